"""Whether a request that failed before its first byte is tried on another endpoint. Pure: knows no HTTP, time comes in.

Four things bound it: attempts and a deadline for each request, a budget for all of them (a share of what arrives, as in
Finagle and Envoy, so that a fleet that fails gets little more than its load), and the engines a request has ended: one
that ended two is not given a third.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from mini_infer_gateway.fleet.breaker import Cause
from mini_infer_gateway.pipeline.poison_requests import KILLS_LIMIT


class Failure(Enum):
    """Why an attempt failed before its first byte; the value is the metric's label."""

    CONNECT = "connect"
    """No connection: nothing was sent."""
    BROKE = "broke"
    """The connection broke."""
    MALFORMED = "malformed"
    """What came was not one response of HTTP."""
    TIMEOUT = "timeout"
    DRAINING = "draining"
    STATUS = "status"
    """A 5xx."""
    DIED = "engine_dead"
    """A 503 that says that the engine behind it has ended."""
    OVERLOADED = "overloaded"
    """A 429: it has no room."""
    HUNG = "hung"
    """Moved away from an endpoint that stopped working."""
    REMOVED = "removed"
    """Moved away from an endpoint that its source no longer lists."""


CAUSE = {
    Failure.CONNECT: Cause.UNREACHABLE,
    Failure.BROKE: Cause.UNREACHABLE,
    Failure.MALFORMED: Cause.STATUS,
    Failure.TIMEOUT: Cause.TIMEOUT,
    Failure.HUNG: Cause.TIMEOUT,
    Failure.STATUS: Cause.STATUS,
    Failure.DIED: Cause.STATUS,
}
"""What it says of the endpoint's health; the others say nothing."""
KILLS = frozenset((Failure.BROKE, Failure.DIED))
"""The request may have been what ended the engine."""
FREE = frozenset((Failure.CONNECT, Failure.DRAINING))
"""No engine did any work for it: outside the budget."""
LEAST_TIME_S = 0.05
"""Before the deadline: with less there is no point in another try."""

BUDGET_SHARE = 0.2
"""Retries a request that arrives pays for."""
BUDGET_RESERVE = 100.0
"""Retries that are there at the start and after a quiet time: an engine that dies takes this many with it."""
BUDGET_REFILL_PER_S = 5.0
BUDGET_LIMIT = 1000.0


@dataclass(slots=True)
class RetryBudget:
    """One for all requests of a gateway."""

    tokens: float = BUDGET_RESERVE
    refilled_s: float = 0.0

    def earn(self, now_s: float) -> None:
        """A request arrived."""
        self._refill(now_s)
        self.tokens = min(BUDGET_LIMIT, self.tokens + BUDGET_SHARE)

    def spend(self, now_s: float) -> bool:
        """Pays for one retry, if there is enough."""
        self._refill(now_s)
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def _refill(self, now_s: float) -> None:
        grown = self.tokens + BUDGET_REFILL_PER_S * max(0.0, now_s - self.refilled_s)
        self.tokens, self.refilled_s = max(self.tokens, min(BUDGET_RESERVE, grown)), now_s


@dataclass(slots=True)
class Attempts:
    """Those of one request."""

    budget: RetryBudget
    limit: int
    deadline_s: float
    count: int = 0
    """Begun so far."""
    kills: int = 0
    """Engines that ended with this request on them, also when a client sent it before."""
    reasons: list[str] = field(default_factory=list)
    """Why each failed, for the client's last message."""

    def retry(self, failure: Failure, others_left: Callable[[Failure], bool], now_s: float) -> bool:
        """Whether to try again after `failure`; to be asked once for each: True is paid for."""
        self.kills += failure in KILLS
        if self.kills >= KILLS_LIMIT or self.count >= self.limit or now_s >= self.deadline_s - LEAST_TIME_S:
            return False
        if not others_left(failure):
            return False
        return failure in FREE or self.budget.spend(now_s)
