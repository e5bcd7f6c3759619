"""Whether an endpoint that still accepts connections has stopped working: a stopped process, a deadlock, a lost node.

Pure: facts and the time come in, a cause or None goes out. Two signs are used. An engine of ours reports its load at
least once a second from the loop that computes, so silence is a verdict of its own. Of others only answers are known:
one whose requests wait for a first byte, while not a byte of anything arrives from it and its peers answer, is stuck.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mini_infer_gateway.fleet.breaker import Cause

SILENT_S = 3.5
"""Without a load report: three reports and the length of an unusually long step."""
SUSPECT_S = 2.5
"""Without a byte while requests wait: time to ask whether it is ready."""
STUCK_S = 4.0
"""Without a byte while requests wait and peers answer, at least."""
PEERS_FACTOR = 3.0
"""Times the slowest recent answer of a peer: long prompts are slow everywhere."""
CONFIRMED_S = 10.0
"""After this much silence requests without an answer are moved even if its HTTP server still answers."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What was seen of an endpoint, on the caller's monotonic clock."""

    report_s: float | None = None
    """When its last load report came over the event socket that is open now; None: none has."""
    byte_s: float = 0.0
    """When a byte of any answer last came from it."""
    waiting_since_s: float | None = None
    """Since when, without a break, at least one of our requests is without a first byte; None: there is none."""
    abandoned_s: float = 0.0
    """How long requests whose clients gave up had waited before that, without a byte of anything since."""
    unready: bool = False
    """It was asked whether it is ready, and did not say so."""

    def quiet_s(self, now_s: float) -> float:
        """How long requests have waited for it since its last byte, those of clients that gave up included."""
        waiting_s = 0.0 if self.waiting_since_s is None else now_s - max(self.waiting_since_s, self.byte_s)
        return self.abandoned_s + waiting_s


def is_suspect(signs: Signs, now_s: float) -> bool:
    """Whether to ask it if it is ready."""
    return signs.quiet_s(now_s) > SUSPECT_S


def verdict(signs: Signs, peers_first_byte_s: Iterable[float], now_s: float) -> Cause | None:
    """Why it should get no requests; None: nothing speaks against it.

    `peers_first_byte_s`: how long its peers' recent first bytes took.
    """
    if signs.report_s is not None and now_s - signs.report_s > SILENT_S:
        return Cause.SILENT
    quiet_s = signs.quiet_s(now_s)
    if signs.report_s is not None or signs.unready:
        return Cause.SLOW if signs.unready and quiet_s > SUSPECT_S else None
    slowest_s = max(peers_first_byte_s, default=float("inf"))
    return Cause.SLOW if quiet_s > max(STUCK_S, PEERS_FACTOR * slowest_s) else None


def is_confirmed(signs: Signs, now_s: float) -> bool:
    """Whether what waits on an endpoint with a verdict should be moved: a long step looks the same at first."""
    return signs.unready or signs.report_s is None or now_s - signs.report_s > CONFIRMED_S
