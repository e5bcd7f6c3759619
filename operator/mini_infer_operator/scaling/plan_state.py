"""Defines what the planner is given of engines, what it recommends, and what it remembers between samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mini_infer_operator.scaling.forecast import NO_HISTORY, NO_MARGIN, History, Margin
from mini_infer_operator.scaling.running import NOTHING_RUNS, Running

PREFILL, DECODE, PAIR = "prefill", "decode", "prefill+decode"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of one role now."""

    replicas: int
    """Engines that exist or are being started."""
    ready: int


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """The memory of the planner of one role."""

    history: History = NO_HISTORY
    margin: Margin = NO_MARGIN
    """The forecast's margin by this history."""
    running: Running = NOTHING_RUNS
    """The engines that running requests needed."""
    needs: tuple[tuple[float, float, float], ...] = ()
    """Times of the past, the engines needed then, and those without short peaks, the latest last."""
    correction: float = 1.0
    patience: float = 1.0
    """The factor on the window in which no engine is removed after some were added, and the one by which engines are
    kept for rarer peaks.
    """
    removed_s: float | None = None
    """The time at which engines were last removed, or the patience last shrank."""
    added_s: float | None = None
    """The time at which engines were last added: for a window from then, none is removed."""
    seen_since_s: float | None = None
    """The time of the first sample: before a whole window has passed, no engine is removed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the planner of one service. A new operator begins with an empty one, and removes no engine until
    it has seen a whole window.
    """

    roles: Mapping[str, RoleMemory] = field(default_factory=dict)
    busy_s: float | None = None
    """The time of the latest sample that was not idle."""
    prompt_tokens: float = 0.0
    """The mean number of uncached tokens of a prompt."""
    request_work: float = 0.0
    """The work of one request a second."""
    sampled_s: float | None = None
    """The time of the latest sample."""
    answer_s: float = 0.0
    """The mean seconds for which a request is decoded."""
    output_tokens_per_s: float = 0.0
    """The rate at which output tokens are computed."""
    switched_s: float | None = None
    """The time at which engines last switched between prefill and decode."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The replicas of one role, with the reason."""

    replicas: int
    needed: float
    """Engines that the load needs, before windows and bounds."""
    why: str
    bounds: tuple[int, int] = (0, 0)
    """The fewest and the most engines of the role now."""
