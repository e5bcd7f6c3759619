"""Detects endpoints that accept connections but have stopped working: a stopped process, a deadlock, a lost node.

Pure: facts and the time come in, a cause or None goes out. There are two signs. An engine of this project reports its
load at least once a second from the loop that computes, so silence is a verdict of its own. Of other engines only
answers are known: one is stuck if its requests wait for a first byte, no byte of any answer arrives from it, and its
peers answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mini_infer_gateway.fleet.breaker import Cause

SILENT_S = 3.5
"""Seconds without a load report before a verdict: three reports and the length of an unusually long step."""
SUSPECT_S = 2.5
"""Seconds without a byte, while requests wait, after which its readiness is probed."""
STUCK_S = 4.0
"""Smallest number of seconds without a byte, while requests wait and peers answer, before a verdict."""
PEERS_FACTOR = 3.0
"""Multiple of the slowest recent answer of a peer that must also have passed: long prompts are slow everywhere."""
CONFIRMED_S = 10.0
"""Seconds without a load report after which waiting requests are moved even if its HTTP server still answers."""


@dataclass(frozen=True, slots=True)
class LivenessSignals:
    """The observations of an endpoint, on the caller's monotonic clock."""

    report_s: float | None = None
    """Time of the last load report over the present event socket; None if there was none."""
    byte_s: float = 0.0
    """Time at which a byte of any answer last arrived."""
    waiting_since_s: float | None = None
    """Time since which at least one request has always been without a first byte; None if there is none now."""
    abandoned_s: float = 0.0
    """Seconds for which abandoned requests had waited before that, without a byte of any answer since."""
    unready: bool = False
    """True if the last readiness probe did not succeed."""

    def quiet_s(self, now_s: float) -> float:
        """Returns the seconds for which requests, abandoned ones included, have waited since its last byte."""
        waiting_s = 0.0 if self.waiting_since_s is None else now_s - max(self.waiting_since_s, self.byte_s)
        return self.abandoned_s + waiting_s


def is_suspect(signals: LivenessSignals, now_s: float) -> bool:
    """True if its readiness should be probed."""
    return signals.quiet_s(now_s) > SUSPECT_S


def verdict(signals: LivenessSignals, peers_first_byte_s: Iterable[float], now_s: float) -> Cause | None:
    """Returns the cause for which the endpoint should get no requests; None if it seems healthy.

    `peers_first_byte_s` are the seconds that its peers' recent first bytes took.
    """
    if signals.report_s is not None and now_s - signals.report_s > SILENT_S:
        return Cause.SILENT
    quiet_s = signals.quiet_s(now_s)
    if signals.report_s is not None or signals.unready:
        return Cause.SLOW if signals.unready and quiet_s > SUSPECT_S else None
    slowest_s = max(peers_first_byte_s, default=float("inf"))
    return Cause.SLOW if quiet_s > max(STUCK_S, PEERS_FACTOR * slowest_s) else None


def is_confirmed(signals: LivenessSignals, now_s: float) -> bool:
    """True if requests that wait on an endpoint with a verdict should be moved: a long step looks the same at first."""
    return signals.unready or signals.report_s is None or now_s - signals.report_s > CONFIRMED_S
