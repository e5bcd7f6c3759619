"""Decides whether a request that failed before its first byte is tried on another endpoint. Pure: no sockets, no clock.

Four limits apply: attempts and a deadline for each request; a budget for all of them (a share of what arrives, as in
Finagle and Envoy, so that a failing fleet gets little more than its load); and the engines that a request has ended: a
request that ended two is not sent to a third.
"""

from dataclasses import dataclass
from enum import Enum

from mini_infer_gateway.fleet.breaker import Cause
from mini_infer_gateway.http.upstream import (
    ConnectError,
    MalformedResponseError,
    UpstreamError,
    UpstreamTimeoutError,
)
from mini_infer_gateway.pipeline.poison_requests import KILLS_LIMIT


class Failure(Enum):
    """The reason why an attempt failed before its first byte; the value is the metric's label."""

    CONNECT = "connect"
    """No connection could be made: nothing was sent."""
    BROKE = "broke"
    """The connection broke."""
    MALFORMED = "malformed"
    """The endpoint sent something that is not one HTTP response."""
    TIMEOUT = "timeout"
    DRAINING = "draining"
    STATUS = "status"
    """The endpoint answered 5xx."""
    DIED = "engine_dead"
    """The endpoint answered 503 and reported that the engine behind it has ended."""
    OVERLOADED = "overloaded"
    """The endpoint answered 429: it has no room."""
    UNATTAINABLE = "slo_unattainable"
    """The endpoint answered 429 for this request's latency targets; it has room for others."""
    HUNG = "hung"
    """The request was moved away from an endpoint that stopped working."""
    REMOVED = "removed"
    """The request was moved away from an endpoint that its source no longer lists."""


class AttemptError(Exception):
    """An attempt failed before anything was sent to the client.

    `again` is True if another endpoint is to be tried, and False if no attempt is left.
    """

    def __init__(self, failure: Failure, detail: str, again: bool) -> None:
        super().__init__(detail)
        self.failure, self.again = failure, again


def failure_of(error: UpstreamError) -> Failure:
    """Returns the failure that an error of a connection is."""
    if isinstance(error, ConnectError):
        return Failure.CONNECT
    if isinstance(error, MalformedResponseError):
        return Failure.MALFORMED
    return Failure.TIMEOUT if isinstance(error, UpstreamTimeoutError) else Failure.BROKE


CAUSE = {
    Failure.CONNECT: Cause.UNREACHABLE,
    Failure.BROKE: Cause.UNREACHABLE,
    Failure.MALFORMED: Cause.STATUS,
    Failure.TIMEOUT: Cause.TIMEOUT,
    Failure.HUNG: Cause.TIMEOUT,
    Failure.STATUS: Cause.STATUS,
    Failure.DIED: Cause.STATUS,
}
"""The cause that a failure reports to the endpoint's circuit breaker; failures without an entry report nothing."""
KILLS = frozenset((Failure.BROKE, Failure.DIED))
"""Failures in which the request may be what ended the engine."""
FREE = frozenset((Failure.CONNECT, Failure.DRAINING))
"""Failures in which no engine did any work: their retries do not count against the budget."""
LEAST_TIME_S = 0.05
"""Seconds before the deadline: if less is left, another attempt is useless."""

BUDGET_SHARE = 0.2
"""Retries that each arriving request adds to the budget."""
BUDGET_RESERVE = 100.0
"""Retries available at the start and after a quiet period: an engine that dies takes about this many requests with it.
"""
BUDGET_REFILL_PER_S = 5.0
BUDGET_LIMIT = 1000.0


@dataclass(slots=True)
class RetryBudget:
    """A budget of retries that all requests of a gateway share."""

    tokens: float = BUDGET_RESERVE
    refilled_s: float = 0.0

    def earn(self, now_s: float) -> None:
        """Adds the share of a request that has arrived."""
        self._refill(now_s)
        self.tokens = min(BUDGET_LIMIT, self.tokens + BUDGET_SHARE)

    def spend(self, now_s: float) -> bool:
        """Deducts one retry from the budget. Returns False if not enough is left."""
        self._refill(now_s)
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def _refill(self, now_s: float) -> None:
        grown = self.tokens + BUDGET_REFILL_PER_S * max(0.0, now_s - self.refilled_s)
        self.tokens, self.refilled_s = max(self.tokens, min(BUDGET_RESERVE, grown)), now_s


def allows_attempt(attempts: int, limit: int, kills: int, left_s: float) -> bool:
    """Returns True if a request's own limits allow another attempt.

    `attempts` is the number of attempts begun, `kills` that of the engines that ended while they processed the request,
    and `left_s` the time until its deadline.
    """
    return kills < KILLS_LIMIT and attempts < limit and left_s > LEAST_TIME_S
