"""How long a request will wait at the gateway: the work before it over the rate at which that is worked off. Pure.

What the work turns out to be is not known beforehand: prefixes that waiting requests share are computed once, answers
hold pages. So predictions are multiplied by what waits that ended were of theirs, the latest counting most.
"""

LEAST_S = 0.05
"""Shorter waits teach nothing."""
GAIN = 0.1
LEAST_FACTOR, MOST_FACTOR = 0.2, 5.0
LONGEST_RETRY_AFTER_S = 120


class WaitPrediction:
    """One pool's."""

    def __init__(self) -> None:
        self.factor = 1.0

    def seconds(self, tokens: float, tokens_per_s: float) -> float:
        """Until so many tokens are worked off at this rate."""
        return self.factor * tokens / tokens_per_s

    def learn(self, predicted_s: float, waited_s: float) -> None:
        """A request was predicted to wait so long when it came, and did wait that long."""
        if predicted_s < LEAST_S or waited_s < LEAST_S:
            return
        wanted = min(MOST_FACTOR, max(LEAST_FACTOR, self.factor * waited_s / predicted_s))
        self.factor += GAIN * (wanted - self.factor)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds for the `Retry-After` header."""
    return max(1, min(LONGEST_RETRY_AFTER_S, round(wait_s)))
