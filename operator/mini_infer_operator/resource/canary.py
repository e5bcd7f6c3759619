"""Defines `spec.rollout.canary`: the steps in which a new revision gets requests, and what rolls it back."""

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from mini_infer_operator.resource.quantity import Quantity, parse_quantity
from mini_infer_operator.resource.rules import ApiModel, Rule

MOST_STEPS = 20
LONGEST_PAUSE_S = 86_400
_PERCENT_PATTERN = r"^(100|[1-9]?[0-9])%$"


def _checked_percent(value: str) -> str:
    number = value.removesuffix("%")
    if not value.endswith("%") or not (number.isascii() and number.isdigit()) or str(int(number)) != number:
        raise ValueError(f"{value!r} is no percentage: write a whole number with %, such as 5%")
    if int(number) > 100:
        raise ValueError(f"{value} is more than all requests: write at most 100%")
    return value


Percent = Annotated[
    str,
    AfterValidator(_checked_percent),
    WithJsonSchema({"type": "string", "maxLength": 4, "pattern": _PERCENT_PATTERN}),
]


class CanaryStep(ApiModel):
    """One step: what the new revision gets, and for how long at least."""

    rules = (
        Rule(
            "has(self.mirror) != has(self.weight)",
            "a step of canary.steps has a mirror or a weight: write one of them, such as weight: 5%",
            lambda s: (s.mirror is None) != (s.weight is None),
        ),
    )
    mirror: Percent | None = None
    """Share of the requests of which the new revision gets copies once they are answered; its answers are dropped."""
    weight: Percent | None = None
    """Share of the sessions whose requests the new revision answers."""
    pause_seconds: int | None = Field(default=None, ge=0, le=LONGEST_PAUSE_S)
    """Seconds that the step lasts at least; 60 if left out."""


class CanaryAnswers(ApiModel):
    """The comparison of answers: both revisions score the same text of the old one."""

    samples: int | None = Field(default=None, ge=0, le=1000)
    """Answers that must be compared before the new revision gets all requests; 0 compares none. 5 if left out."""
    max_divergence: float | None = Field(default=None, ge=0, le=100)
    """Mean absolute difference of log probabilities, in nats a token, above which it is rolled back; 0.2 if left
    out. Raise it, or set samples to 0, for an edit that changes the model itself."""


class CanaryAnalysis(ApiModel):
    """The limits of a new revision, compared with the old one at the same time: a broken one rolls it back."""

    rules = (
        Rule(
            "!has(self.maxMemoryGrowth) || !quantity(string(self.maxMemoryGrowth)).isLessThan(quantity('0'))",
            "analysis.maxMemoryGrowth must not be negative: every revision would be rolled back",
            lambda a: a.max_memory_growth is None or parse_quantity(a.max_memory_growth) >= 0,
        ),
    )
    max_error_share: Percent | None = None
    """Share of requests that its engines may fail beyond that of the old revision, from three failures on; 1% if left
    out."""
    max_latency_ratio: float | None = Field(default=None, ge=1, le=1000)
    """Times to the first token, between tokens and for whole answers, as multiples of the old revision's; 1.5 if left
    out."""
    min_requests: int | None = Field(default=None, ge=0, le=1_000_000)
    """Requests that a step must have seen before the next one begins, unless progressDeadlineSeconds pass; 20 if left
    out. Latencies are compared from as many on."""
    max_restarts: int | None = Field(default=None, ge=0, le=1000)
    """Times that its engines may end and start again; 0 if left out."""
    max_memory_growth: Quantity | None = None
    """Main memory by which one of its engines may grow in a minute, without pause, beyond the old ones; 256Mi if left
    out."""
    answers: CanaryAnswers | None = None
    """The comparison of answers."""


class Canary(ApiModel):
    """The judgement of a new revision before it replaces the old one; {} is enough."""

    steps: list[CanaryStep] | None = Field(default=None, min_length=1, max_length=MOST_STEPS)
    """The steps in order. If left out: mirror 20%, then weights of 5%, 25% and 50%, for a minute each."""
    analysis: CanaryAnalysis | None = None
    """The limits of the new revision."""
