"""How long a transfer should take, when it counts as late, and whether it is worth it. Pure arithmetic on rates."""

from dataclasses import dataclass

LATE_FACTOR = 2.0
"""Times its estimate, after which a transfer counts as late."""
LEAST_WAIT_S = 0.5
"""Sooner nothing counts as late: below it, the schedulers of both machines are what is measured."""
_NEWEST_SHARE = 0.3
_REFUSALS = 16
"""After so many fetches in a row that would not have paid one is tried: what was slow once is timed again."""


@dataclass(slots=True)
class RateMeter:
    """Something a second, as measured lately: an exponential average in which long measurements do not count more."""

    per_s: float = 0.0
    """0: not measured yet."""

    def add(self, amount: float, seconds: float) -> None:
        """One more measurement."""
        if amount > 0 and seconds > 0:
            rate = amount / seconds
            self.per_s = rate if not self.per_s else self.per_s + _NEWEST_SHARE * (rate - self.per_s)


def prefill_estimate_s(
    queued_tokens: int, tokens: int, prefill_tokens_per_s: float, num_bytes: int, bytes_per_s: float
) -> float | None:
    """Until a prompt of so many missing tokens has been computed elsewhere and is here; None: no rate is known.

    What is written while more is computed is hidden, so the sum is an upper estimate.
    """
    if not prefill_tokens_per_s:
        return None
    return (queued_tokens + tokens) / prefill_tokens_per_s + read_estimate_s(num_bytes, bytes_per_s)


def read_estimate_s(num_bytes: int, bytes_per_s: float) -> float:
    """To move so many bytes; 0 where the rate is not known."""
    return num_bytes / bytes_per_s if bytes_per_s else 0.0


def late_after_s(estimate_s: float | None, timeout_s: float) -> float:
    """From its start, when a transfer of this estimate is late; without an estimate it has the whole time-out."""
    return timeout_s if estimate_s is None else min(timeout_s, max(LATE_FACTOR * estimate_s, LEAST_WAIT_S))


def fetching_pays(tokens: int, num_bytes: int, bytes_per_s: float, prefill_tokens_per_s: float, refused: int) -> bool:
    """Whether keys and values of so many tokens are fetched sooner than computed. Unknown rates: try, and learn.

    refused: how often in a row it did not pay; the rate may be that of a first read, which also connects.
    """
    if not bytes_per_s or not prefill_tokens_per_s or refused >= _REFUSALS:
        return True
    return num_bytes / bytes_per_s < tokens / prefill_tokens_per_s
