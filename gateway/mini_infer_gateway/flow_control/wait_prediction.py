"""Predicts the wait of a request at the gateway: the requests before it, times the pause between two placements. Pure.

This is Little's law. It needs neither the cost of waiting requests nor the number of endpoints: requests move between
endpoints, share prefixes that are computed once, and occupy pages for an unknown time.
"""

GAIN = 0.05
"""Weight of the latest pause in the mean: about the last twenty pauses count."""
LONGEST_RETRY_AFTER_S = 120


class WaitPrediction:
    """The prediction for one pool."""

    def __init__(self) -> None:
        self._pause_s: float | None = None
        self._placed_s: float | None = None

    def seconds(self, ahead: int, otherwise_s: float) -> float:
        """Returns the predicted wait behind `ahead` requests; `otherwise_s` while nothing has been placed yet."""
        return otherwise_s if self._pause_s is None else (ahead + 1) * self._pause_s

    def placed(self, now_s: float, still_waiting: bool) -> None:
        """Records a placement. Time before the first placement and after the last waiting request does not count."""
        if self._placed_s is not None:
            pause_s = now_s - self._placed_s
            self._pause_s = pause_s if self._pause_s is None else self._pause_s + GAIN * (pause_s - self._pause_s)
        self._placed_s = now_s if still_waiting else None


def retry_after_s(wait_s: float) -> int:
    """Returns whole seconds for the `Retry-After` header."""
    return max(1, min(LONGEST_RETRY_AFTER_S, round(wait_s)))
