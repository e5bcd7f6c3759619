"""How long a request will wait at the gateway: those before it, times the pause between two placements. Pure.

This is Little's law, and it needs neither the cost of what waits nor the number of endpoints: requests move between
those, share prefixes that are computed once, and hold pages for a time that nobody knows.
"""

GAIN = 0.05
"""Of the latest pause: about the last twenty count."""
LONGEST_RETRY_AFTER_S = 120


class WaitPrediction:
    """One pool's."""

    def __init__(self) -> None:
        self._pause_s: float | None = None
        self._placed_s: float | None = None

    def seconds(self, ahead: int, otherwise_s: float) -> float:
        """For a request with so many before it; `otherwise_s` while nothing was placed yet."""
        return otherwise_s if self._pause_s is None else (ahead + 1) * self._pause_s

    def placed(self, now_s: float, still_waiting: bool) -> None:
        """A request was placed; what comes before the first and after the last that waits says nothing."""
        if self._placed_s is not None:
            pause_s = now_s - self._placed_s
            self._pause_s = pause_s if self._pause_s is None else self._pause_s + GAIN * (pause_s - self._pause_s)
        self._placed_s = now_s if still_waiting else None


def retry_after_s(wait_s: float) -> int:
    """Whole seconds for the `Retry-After` header."""
    return max(1, min(LONGEST_RETRY_AFTER_S, round(wait_s)))
