"""Whether an endpoint is worth trying: opens after failures in a row, tries one request after a pause. Pure.

Counts connect errors, 5xx and time-outs; a client's own mistakes (4xx) and a drain say nothing about health.
"""

from dataclasses import dataclass

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Breaker:
    """One endpoint's; times are on the caller's monotonic clock."""

    failures: int = 0
    """In a row."""
    opened_times: int = 0
    """In a row; each doubles the pause."""
    retry_at_s: float = 0.0
    probing: bool = False
    """A request is out that decides whether it closes."""

    @property
    def closed(self) -> bool:
        """Nothing speaks against it."""
        return self.opened_times == 0

    def is_open(self, now_s: float) -> bool:
        """Open, and neither due for a try nor untried."""
        return not self.closed and (self.probing or now_s < self.retry_at_s)

    def started(self) -> None:
        """A request goes out."""
        if not self.closed:
            self.probing = True

    def succeeded(self) -> None:
        """It answered, whatever it answered below 500."""
        self.failures = self.opened_times = 0
        self.probing = False

    def failed(self, now_s: float) -> None:
        """A connect error, a 5xx, a time-out or a stream that broke."""
        self.failures += 1
        self.probing = False
        if not self.closed or self.failures >= FAILURES_TO_OPEN:
            self.retry_at_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.opened_times)
            self.opened_times += 1

    def ended(self) -> None:
        """It ended without a verdict: the client went, or the endpoint drains."""
        self.probing = False
