"""Reads what waits at the gateway for each candidate: prompt tokens before this request, and the wait for pages."""

from collections.abc import Sequence

from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.placement_pauses import lacks_pages
from mini_infer_gateway.routing.base import AHEAD_TOKENS, PAGE_WAIT, Candidate, Features, RoutingRequest


class WaitingAhead:
    """Provides the uncached tokens of waiting requests, and the pause until an endpoint has pages for one more."""

    name = "waiting_ahead"
    provides = (AHEAD_TOKENS, PAGE_WAIT)

    def __init__(self, backlog: Backlog, ledger: LoadLedger) -> None:
        self._backlog, self._ledger = backlog, ledger

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Features:
        """Sums what waits ahead of this request for each candidate."""
        if not self._backlog:
            nothing = [0] * len(candidates)
            return {AHEAD_TOKENS: nothing, PAGE_WAIT: nothing}
        names, pause_s = [candidate.name for candidate in candidates], self._backlog.pauses.seconds
        loads = zip(names, self._ledger.loads(names), strict=True)
        return {
            AHEAD_TOKENS: [self._backlog.ahead(name, request.order, request.flow)[1] for name in names],
            PAGE_WAIT: [pause_s(name, now_s) if lacks_pages(load) else 0.0 for name, load in loads],
        }
