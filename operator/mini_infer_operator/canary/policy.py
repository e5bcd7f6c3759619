"""Reads `spec.rollout.canary` as numbers, with the defaults for what is left out."""

from dataclasses import dataclass

from mini_infer_operator.resource import (
    CanaryAnalysis,
    CanaryAnswers,
    CanaryStep,
    InferenceService,
    parse_quantity,
)

DEFAULT_PAUSE_S = 60
DEFAULT_STEPS = (CanaryStep(mirror="20%"), CanaryStep(weight="5%"), CanaryStep(weight="25%"), CanaryStep(weight="50%"))
DEFAULT_DEADLINE_S = 600


@dataclass(frozen=True, slots=True)
class Step:
    """A step: the new revision's shares in percent, and the seconds that it lasts at least."""

    weight: int = 0
    mirror: int = 0
    pause_s: int = DEFAULT_PAUSE_S


@dataclass(frozen=True, slots=True)
class Analysis:
    """The limits of a new revision; the defaults are those of the resource."""

    max_error_share: float = 0.01
    max_latency_ratio: float = 1.5
    min_requests: int = 20
    max_restarts: int = 0
    max_memory_growth_bytes: float = 256 << 20
    samples: int = 5
    max_divergence: float = 0.2


@dataclass(frozen=True, slots=True)
class CanaryPolicy:
    """The steps and limits of a service."""

    steps: tuple[Step, ...]
    analysis: Analysis = Analysis()
    deadline_s: float = DEFAULT_DEADLINE_S
    """Seconds without progress after which missing engines roll the revision back, and missing requests hold it up no
    longer.
    """


def canary_policy(service: InferenceService) -> CanaryPolicy | None:
    """Returns the service's policy; None if new revisions are not judged."""
    rollout = service.spec.rollout
    if rollout is None or rollout.canary is None:
        return None
    deadline_s = rollout.progress_deadline_seconds
    steps = tuple(_step(step) for step in rollout.canary.steps or DEFAULT_STEPS)
    return CanaryPolicy(
        steps, _analysis(rollout.canary.analysis), DEFAULT_DEADLINE_S if deadline_s is None else deadline_s
    )


def _step(given: CanaryStep) -> Step:
    pause_s = DEFAULT_PAUSE_S if given.pause_seconds is None else given.pause_seconds
    return Step(_percent(given.weight or "0%"), _percent(given.mirror or "0%"), pause_s)


def _analysis(given: CanaryAnalysis | None) -> Analysis:
    given = given or CanaryAnalysis()
    answers, defaults = given.answers or CanaryAnswers(), Analysis()
    growth = given.max_memory_growth

    def chosen(value: float | None, default: float) -> float:
        return default if value is None else value

    return Analysis(
        max_error_share=defaults.max_error_share
        if given.max_error_share is None
        else _percent(given.max_error_share) / 100,
        max_latency_ratio=chosen(given.max_latency_ratio, defaults.max_latency_ratio),
        min_requests=int(chosen(given.min_requests, defaults.min_requests)),
        max_restarts=int(chosen(given.max_restarts, defaults.max_restarts)),
        max_memory_growth_bytes=defaults.max_memory_growth_bytes if growth is None else parse_quantity(growth),
        samples=int(chosen(answers.samples, defaults.samples)),
        max_divergence=chosen(answers.max_divergence, defaults.max_divergence),
    )


def _percent(text: str) -> int:
    return int(text.removesuffix("%"))
