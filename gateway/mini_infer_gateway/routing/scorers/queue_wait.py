"""Prefers who can begin sooner: the seconds that an endpoint needs for the prompt tokens that are before this request.

Those are queued at the endpoint already, or wait at the gateway for it and go first.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import AHEAD_TOKENS, PREFILL_RATE, QUEUED_TOKENS, Facts, RoutingRequest
from mini_infer_gateway.routing.seconds import score_of


class QueueWait:
    """Seconds until the endpoint gets to this request."""

    name = "queue_wait"
    needs = (QUEUED_TOKENS, AHEAD_TOKENS, PREFILL_RATE)

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        tables = (facts[QUEUED_TOKENS], facts[AHEAD_TOKENS], facts[PREFILL_RATE])
        return score_of([(queued + ahead) / rate for queued, ahead, rate in zip(*tables, strict=True)])
