"""Decides whether an endpoint is worth trying: a circuit breaker that opens after consecutive failures. Pure.

An open circuit admits one request after a pause that doubles with each opening, and closes at that request's first
byte. It also closes without a request when there is evidence that the cause is over (see CLOSED_BY). A client's own
mistakes (4xx) and a drain do not count as failures.
"""

from dataclasses import dataclass
from enum import Enum

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Cause(Enum):
    """The cause for which a circuit opened; the value is the metric's label."""

    UNREACHABLE = "unreachable"
    """No connection could be made, or it broke."""
    STATUS = "status"
    """The endpoint answered 5xx."""
    TIMEOUT = "timeout"
    """The endpoint accepted a request and was silent for too long."""
    SILENT = "silent"
    """Load reports of the endpoint stopped."""
    TRANSFER = "transfer"
    """Decode engines could not fetch the KV cache that the endpoint was to compute for them."""
    SLOW = "slow"
    """Requests to the endpoint wait for a first byte far longer than requests to its peers."""


class Evidence(Enum):
    """Evidence, without a client's request, that an endpoint works again."""

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
    """The circuit breaker of one endpoint; times are on the caller's monotonic clock.

    `started` returns a generation, which the verdicts of that request pass on: a request that was sent before the
    circuit opened can neither lengthen the pause nor close the circuit.
    """

    cause: Cause | None = None
    """The reason why the circuit is open; None if it is closed."""
    failures: int = 0
    """Number of failures since the circuit last closed or a request succeeded."""
    openings: int = 0
    """Number of openings since a request last succeeded; each doubles the pause."""
    retry_at_s: float = 0.0
    probing: bool = False
    """True while a request is in flight that decides whether the circuit closes."""
    generation: int = 0

    @property
    def closed(self) -> bool:
        """True if the circuit is closed."""
        return self.cause is None

    def is_open(self, now_s: float) -> bool:
        """True if the endpoint may not be chosen now.

        The circuit is open then, and it is too early for a probe, or a probe is in flight.
        """
        return not self.closed and (self.probing or now_s < self.retry_at_s)

    def started(self) -> int:
        """Records that a request is sent, and returns the generation for its verdicts."""
        if not self.closed:
            self.probing = True
        return self.generation

    def first_byte(self, generation: int) -> None:
        """Records the start of an answer below 500: enough to close the circuit, not enough to reset the pause."""
        if generation == self.generation and not self.closed:
            self._close()

    def succeeded(self, generation: int) -> None:
        """Records a complete answer."""
        if generation == self.generation:
            self._close()
            self.openings = 0

    def failed(self, generation: int, now_s: float, cause: Cause) -> None:
        """Records a connect error, a 5xx, a time-out or a stream that broke."""
        if generation != self.generation:
            return
        self.failures += 1
        if not self.closed or self.failures >= FAILURES_TO_OPEN:
            self.trip(now_s, cause)

    def ended(self, generation: int) -> None:
        """Records a request without a verdict: the client disconnected, or the endpoint drains or has no room."""
        if generation == self.generation:
            self.probing = False

    def trip(self, now_s: float, cause: Cause) -> None:
        """Opens the circuit."""
        self.retry_at_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.openings, 10))
        self.openings += 1
        self.generation += 1
        self.cause, self.probing = cause, False

    def learned(self, evidence: Evidence) -> bool:
        """Takes evidence that came without a request. Returns True if it closed the circuit."""
        if self.cause is None or evidence not in CLOSED_BY[self.cause]:
            return False
        self._close()
        return True

    def _close(self) -> None:
        self.cause, self.failures, self.probing = None, 0, False
