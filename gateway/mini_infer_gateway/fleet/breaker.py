"""Whether an endpoint is worth trying: a circuit breaker that opens after failures in a row. Pure, knows no sockets.

Open, it lets one request try after a pause that doubles with each opening, and closes at that request's first byte. It
also closes without any request when something shows that the cause is over: see CLOSED_BY. A client's own mistakes
(4xx) and a drain say nothing about health.
"""

from dataclasses import dataclass
from enum import Enum

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Cause(Enum):
    """Why a circuit opened; the value is the metric's label."""

    UNREACHABLE = "unreachable"
    """No connection could be made, or it broke."""
    STATUS = "status"
    """It answered 5xx."""
    TIMEOUT = "timeout"
    """It accepted a request and said nothing for too long."""
    SILENT = "silent"
    """Its load reports stopped coming."""
    TRANSFER = "transfer"
    """Decode engines could not get the KV cache that it was to compute for them."""
    SLOW = "slow"
    """Its requests wait for a first byte far longer than its peers'."""


class Evidence(Enum):
    """What shows, without a client's request, that an endpoint works again."""

    SOCKET = "a new handshake with its event socket"
    READY = "it answered that it is ready"
    READY_AGAIN = "it answered that it is ready after it did not"
    REPORT = "a load report came"


CLOSED_BY = {
    Cause.UNREACHABLE: frozenset((Evidence.SOCKET, Evidence.READY, Evidence.READY_AGAIN)),
    # An endpoint that calls itself ready while it fails requests must prove itself with a request.
    Cause.STATUS: frozenset((Evidence.SOCKET, Evidence.READY_AGAIN)),
    Cause.TIMEOUT: frozenset((Evidence.SOCKET, Evidence.READY_AGAIN)),
    Cause.SILENT: frozenset((Evidence.SOCKET, Evidence.READY_AGAIN, Evidence.REPORT)),
    Cause.TRANSFER: frozenset((Evidence.SOCKET, Evidence.READY_AGAIN)),
    Cause.SLOW: frozenset((Evidence.SOCKET, Evidence.READY_AGAIN)),
}


@dataclass(slots=True)
class Breaker:
    """One endpoint's; times are on the caller's monotonic clock.

    `started` gives a generation, and the verdicts of that request name it: what was sent before the circuit opened can
    neither lengthen the pause nor close the circuit.
    """

    cause: Cause | None = None
    """Why it is open; None: it is closed."""
    failures: int = 0
    """Since an answer was whole."""
    openings: int = 0
    """Since an answer was whole; each doubles the pause."""
    retry_at_s: float = 0.0
    probing: bool = False
    """A request is out that decides whether it closes."""
    generation: int = 0

    @property
    def closed(self) -> bool:
        """Nothing speaks against it."""
        return self.cause is None

    def is_open(self, now_s: float) -> bool:
        """Not to be chosen now: open, and neither due for a try nor without one."""
        return not self.closed and (self.probing or now_s < self.retry_at_s)

    def started(self) -> int:
        """A request goes out; returns the generation for its verdicts."""
        if not self.closed:
            self.probing = True
        return self.generation

    def first_byte(self, generation: int) -> None:
        """It began to answer below 500: enough to close, not enough to forget earlier failures."""
        if generation == self.generation and not self.closed:
            self._close()

    def succeeded(self, generation: int) -> None:
        """The answer is whole."""
        if generation == self.generation:
            self._close()
            self.openings = 0

    def failed(self, generation: int, now_s: float, cause: Cause) -> None:
        """A connect error, a 5xx, a time-out or a stream that broke."""
        if generation != self.generation:
            return
        self.failures += 1
        if not self.closed or self.failures >= FAILURES_TO_OPEN:
            self.trip(now_s, cause)

    def ended(self, generation: int) -> None:
        """It ended without a verdict: the client went, or the endpoint drains or has no room."""
        if generation == self.generation:
            self.probing = False

    def trip(self, now_s: float, cause: Cause) -> None:
        """Opens it."""
        self.retry_at_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.openings, 10))
        self.openings += 1
        self.generation += 1
        self.cause, self.probing = cause, False

    def learned(self, evidence: Evidence) -> bool:
        """Takes evidence that came without a request; True: it closed the circuit."""
        if self.cause is None or evidence not in CLOSED_BY[self.cause]:
            return False
        self._close()
        return True

    def _close(self) -> None:
        self.cause, self.failures, self.probing = None, 0, False
