"""Defines `spec.rollout` and `spec.disruptionBudget`: how many engines may be missing or added while things change."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from mini_infer_operator.resource.canary import Canary
from mini_infer_operator.resource.rules import ApiModel, Rule

PERCENTAGE_PATTERN = r"^(100|[1-9]?[0-9])%$"


def _checked_count(value: int | str) -> int | str:
    if isinstance(value, str) and not re.match(PERCENTAGE_PATTERN, value):
        raise ValueError(f"{value!r} is no count: write a whole number such as 1, or a percentage such as 25%")
    if isinstance(value, int) and not 0 <= value <= 1000:
        raise ValueError(f"{value} is no count: write a whole number from 0 to 1000, or a percentage such as 25%")
    return value


CountOrPercent = Annotated[
    int | str,
    AfterValidator(_checked_count),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": 1000,
            "maxLength": 4,
            "pattern": PERCENTAGE_PATTERN,
        }
    ),
]


def _is_zero(value: int | str | None) -> bool:
    return value in {0, "0%"}


class Rollout(ApiModel):
    """The replacement of old engines by those of a new revision; changing it restarts none."""

    rules = (
        Rule(
            "!(has(self.maxSurge) && (self.maxSurge == 0 || self.maxSurge == '0%') && "
            "has(self.maxUnavailable) && (self.maxUnavailable == 0 || self.maxUnavailable == '0%'))",
            "maxSurge and maxUnavailable are both 0, so no engine could ever be replaced: set one of them to 1",
            lambda r: not (_is_zero(r.max_surge) and _is_zero(r.max_unavailable)),
        ),
    )
    paused: bool | None = None
    """While true, edits of the spec wait and engines go on as they were; replicas are scaled all the same, and a
    rollout that has begun goes on, but a canary stays at its step. `mini-infer rollout pause` and `resume` write it."""
    max_surge: CountOrPercent | None = None
    """Engines above `replicas` while a rollout runs, as a number or a percentage rounded up; 1 if left out."""
    max_unavailable: CountOrPercent | None = None
    """Engines below `replicas` that a rollout may stop before their successors are available, as a number or a
    percentage rounded down. If left out: 0 as long as the cluster has room for a new engine beside the old ones, and 1
    where a new engine cannot be scheduled (a full cluster). Write 0 where an autoscaler adds nodes on demand."""
    canary: Canary | None = None
    """Judges a new revision by a share of the requests before it replaces the old one, and rolls it back if it fails;
    left out, a new revision replaces the old one as soon as its engines are ready. Needs the gateway of this project.
    """
    on_default_image: Literal["Roll", "Keep"] | None = None
    """The effect of a new default image of the operator on a service that names none: Roll (if left out) replaces the
    engines when it is the service's turn, Keep stays with the image until the spec is edited.
    """
    min_ready_seconds: int | None = Field(default=None, ge=0, le=3600)
    """Seconds that a new engine must stay ready before it replaces an old one; 10 if left out."""
    progress_deadline_seconds: int | None = Field(default=None, ge=10, le=86400)
    """Seconds without progress until `Progressing` becomes False and old engines that have been unready all that time
    are removed; engines that serve stay. 600 if left out.
    """


class DisruptionBudget(ApiModel):
    """The engines of the service that an eviction (`kubectl drain`, a cluster autoscaler) may take at a time."""

    enabled: bool | None = None
    """False makes the operator create no PodDisruptionBudget; set it if you have one of your own over these pods."""
    max_unavailable: CountOrPercent | None = None
    """Engines that may be missing at a time, as a number or a percentage rounded up; 1 if left out."""
