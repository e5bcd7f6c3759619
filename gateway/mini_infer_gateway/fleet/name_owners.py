"""Decides which service may own a bare model name, and delays changes of owner. Pure; the time is passed in.

The catalog assigns a name by the ages of the services. A name that its owner gave up does not go to another namespace
at once: for a while no endpoint serves it, and this is reported, so that a waiting claim never takes over traffic
silently.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

ANY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class NameRules:
    """Rules that restrict which namespaces may own which bare names."""

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Allowed namespaces by model, or by ANY_MODEL for models without an entry; without either, all are allowed."""

    def allows(self, model: str, service: str) -> bool:
        """True if `service`, a namespace/name, may own the bare name."""
        namespaces = self.allowed.get(model, self.allowed.get(ANY_MODEL))
        return namespaces is None or _namespace(service) in namespaces


@dataclass(frozen=True, slots=True)
class OwnerChange:
    """A bare name that went from one service to another, or is about to."""

    model: str
    before: str
    after: str
    is_withheld: bool
    """True if no endpoint serves the name yet."""


class NameOwners:
    """The owners of names that this gateway has seen."""

    def __init__(self, delay_s: float) -> None:
        """`delay_s` is the time between the loss of an owner and the assignment to a service of another namespace."""
        self._delay_s = delay_s
        self._owners: dict[str, str] = {}
        self._withheld_since_s: dict[str, float] = {}

    def settle(self, owners: Mapping[str, str], now_s: float) -> tuple[frozenset[str], list[OwnerChange]]:
        """Returns the names among `owners` that have no owner for now, and the changes since the last call."""
        withheld, changes = set[str](), []
        for model, after in owners.items():
            before = self._owners.get(model, after)
            if before == after:
                self._own(model, after)
                continue
            is_new = model not in self._withheld_since_s
            since_s = self._withheld_since_s.setdefault(model, now_s)
            if _namespace(before) != _namespace(after) and now_s - since_s < self._delay_s:
                withheld.add(model)
                if is_new:
                    changes.append(OwnerChange(model, before, after, is_withheld=True))
                continue
            changes.append(OwnerChange(model, before, after, is_withheld=False))
            self._own(model, after)
        return frozenset(withheld), changes

    @property
    def is_withholding(self) -> bool:
        """True if a name waits for its new owner."""
        return bool(self._withheld_since_s)

    def _own(self, model: str, service: str) -> None:
        self._owners[model] = service
        self._withheld_since_s.pop(model, None)


def read_rules(texts: Iterable[str]) -> NameRules:
    """Parses `MODEL=NAMESPACE`, which may occur several times for one name. Raises ValueError for any other form."""
    allowed: dict[str, frozenset[str]] = {}
    for text in texts:
        model, equals, namespace = text.rpartition("=")
        if not (model and equals and namespace) or "/" in namespace:
            raise ValueError(f"--model-namespaces {text!r}: write MODEL=NAMESPACE, or *=NAMESPACE for all other names")
        allowed[model] = allowed.get(model, frozenset()) | {namespace}
    return NameRules(allowed)


def _namespace(service: str) -> str:
    return service.partition("/")[0]
