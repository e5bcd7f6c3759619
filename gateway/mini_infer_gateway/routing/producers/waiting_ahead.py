"""Counts what waits at the gateway for each candidate and goes before this request."""

from collections.abc import Sequence

from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.routing.base import AHEAD_REQUESTS, AHEAD_TOKENS, Candidate, Facts, RoutingRequest


class WaitingAhead:
    """Requests and their uncached tokens."""

    name = "waiting_ahead"
    provides = (AHEAD_REQUESTS, AHEAD_TOKENS)

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Facts:
        """See base.Producer."""
        if not self._backlog:
            nothing = [0] * len(candidates)
            return {AHEAD_REQUESTS: nothing, AHEAD_TOKENS: nothing}
        ahead = [self._backlog.ahead(candidate.name, request.order, request.flow) for candidate in candidates]
        return {
            AHEAD_REQUESTS: [requests for requests, _ in ahead],
            AHEAD_TOKENS: [tokens for _, tokens in ahead],
        }
