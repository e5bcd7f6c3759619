"""Estimates the time of a transfer, when it counts as late, and whether it pays. Pure arithmetic on rates."""

from dataclasses import dataclass

LATE_FACTOR = 2.0
"""A transfer counts as late after its estimated time multiplied by this."""
LEAST_WAIT_S = 0.5
"""Seconds before which no transfer counts as late: below it, one measures the schedulers of both machines."""
_NEWEST_SHARE = 0.3
_REFUSALS = 16
"""After this many fetches in a row that would not have paid, one is tried, so that a rate that was slow once is
measured again.
"""


@dataclass(slots=True)
class Load:
    """The core's last report of its load, from which consumers estimate times."""

    queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0


@dataclass(slots=True)
class RateMeter:
    """A recent rate per second: an exponential average in which long measurements count no more than short ones."""

    per_s: float = 0.0
    """The rate; 0 if it has not been measured yet."""

    def add(self, amount: float, seconds: float) -> None:
        """Adds a measurement."""
        if amount > 0 and seconds > 0:
            rate = amount / seconds
            self.per_s = rate if not self.per_s else self.per_s + _NEWEST_SHARE * (rate - self.per_s)


def prefill_estimate_s(
    queued_tokens: int, tokens: int, prefill_tokens_per_s: float, num_bytes: int, bytes_per_s: float
) -> float | None:
    """Estimates the seconds until another engine has computed a prompt's missing tokens and sent them. None if no rate
    is known.

    Writes overlap the computation of later tokens, so the sum is an upper estimate.
    """
    if not prefill_tokens_per_s:
        return None
    return (queued_tokens + tokens) / prefill_tokens_per_s + read_estimate_s(num_bytes, bytes_per_s)


def read_estimate_s(num_bytes: int, bytes_per_s: float) -> float:
    """Estimates the seconds to move this many bytes; 0 if the rate is not known."""
    return num_bytes / bytes_per_s if bytes_per_s else 0.0


def late_after_s(estimate_s: float | None, timeout_s: float) -> float:
    """Returns the seconds after its start at which a transfer of this estimate is late. Without an estimate it has the
    whole time-out.
    """
    return timeout_s if estimate_s is None else min(timeout_s, max(LATE_FACTOR * estimate_s, LEAST_WAIT_S))


def fetching_pays(tokens: int, num_bytes: int, bytes_per_s: float, prefill_tokens_per_s: float, refused: int) -> bool:
    """Returns True if keys and values of these tokens are fetched sooner than computed, or if a rate is still unknown.

    `refused` counts the fetches in a row that did not pay. The rate may be that of a first read, which includes
    connecting, so a fetch is tried again after some refusals.
    """
    if not bytes_per_s or not prefill_tokens_per_s or refused >= _REFUSALS:
        return True
    return num_bytes / bytes_per_s < tokens / prefill_tokens_per_s
