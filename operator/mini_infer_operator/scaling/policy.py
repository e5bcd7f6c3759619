"""Defines what a user wants of scaling, as numbers with their defaults."""

from dataclasses import dataclass
from math import inf

LEAST_DOWN_S = 60.0
"""The shortest default window before engines are removed."""
STARTS_OF_DOWN = 4.0
"""The default window in starts: an engine that is needed again within it would have cost more to start than to keep."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The latencies that requests shall keep, and an upper limit on work in flight."""

    ttft_s: float = 2.0
    """Seconds to the first token."""
    itl_s: float = inf
    """Seconds between two tokens."""
    percentile: float = 0.95
    """The share of requests that shall keep both."""
    tokens_in_flight: float = inf
    """Prompt and output tokens of running requests that one engine shall have at most."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The times for which a recommendation must hold before it is followed."""

    up_s: float = 0.0
    """Seconds for which more engines must be needed."""
    down_s: float | None = None
    """Seconds for which fewer engines must suffice. None: four measured starts, and at least 60."""
    zero_s: float = 300.0
    """Seconds without any request after which the last engine is stopped, if none need stay."""

    def down_after_s(self, start_s: float) -> float:
        """Returns the window before engines are removed, of a service whose engines start in `start_s`."""
        return max(LEAST_DOWN_S, STARTS_OF_DOWN * start_s) if self.down_s is None else self.down_s


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """The bounds, targets and windows of one role."""

    min_replicas: int = 1
    max_replicas: int = 10
    targets: Targets = Targets()
    windows: Windows = Windows()
