"""What the resource has fields for and the engine cannot do yet: refused with a message, never accepted and broken."""

from collections.abc import Callable
from typing import Any

from mini_infer_contract.resources.names import ROLES
from mini_infer_contract.resources.rules import Rule

_EXPERT = (
    "(has(self.spec.{0}) && has(self.spec.{0}.parallelism) && has(self.spec.{0}.parallelism.expert) && "
    "self.spec.{0}.parallelism.expert)"
)


def _size_is_one(size: str) -> tuple[str, Callable[[Any], bool]]:
    """CEL and Python for: no role has `parallelism.SIZE` above 1."""
    path = "has(self.spec.{0}) && has(self.spec.{0}.parallelism) && has(self.spec.{0}.parallelism.{1})"
    above = [f"({path.format(role, size)} && self.spec.{role}.parallelism.{size} > 1)" for role in ROLES]

    def holds(service: Any) -> bool:
        sizes = [role.parallelism for role in service.roles.values() if role.parallelism is not None]
        return all((getattr(parallelism, size) or 1) == 1 for parallelism in sizes)

    return f"!({' || '.join(above)})", holds


def _size(size: str, remedy: str) -> Rule:
    cel, holds = _size_is_one(size)
    return Rule(cel, f"parallelism.{size} above 1 does not work yet: leave it out, and {remedy}", holds)


NOT_YET = (
    _size("pipeline", "set tensor"),
    _size("data", "set replicas"),
    Rule(
        f"!({' || '.join(_EXPERT.format(role) for role in ROLES)})",
        "parallelism.expert does not work yet: leave it out, and every rank has a slice of each expert",
        lambda s: not any(role.parallelism is not None and role.parallelism.expert for role in s.roles.values()),
    ),
)
"""Rules of an InferenceService, each taken away with what makes it needless."""
