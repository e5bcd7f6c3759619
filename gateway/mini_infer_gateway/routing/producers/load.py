"""Reads from the load ledger the work that each candidate has before it can begin this request."""

from collections.abc import Sequence

from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.routing.base import QUEUED_TOKENS, RUNNING, WAITING, Candidate, Features, RoutingRequest


class EndpointLoad:
    """Provides the running and waiting requests, and the queued prompt tokens."""

    name = "load"
    provides = (RUNNING, WAITING, QUEUED_TOKENS)

    def __init__(self, ledger: LoadLedger) -> None:
        self._ledger = ledger

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Features:
        """Reads the load of each candidate from the ledger."""
        loads = self._ledger.loads([candidate.name for candidate in candidates])
        return {
            RUNNING: [load.running for load in loads],
            WAITING: [load.waiting for load in loads],
            QUEUED_TOKENS: [load.queued_tokens for load in loads],
        }
