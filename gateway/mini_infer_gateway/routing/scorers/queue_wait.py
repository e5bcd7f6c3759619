"""Prefers who can begin sooner: the seconds that an endpoint needs for the prompt tokens that are queued there.

Where pages or slots are what an endpoint lacks, tokens say nothing: the wait is the pause between its latest
placements, if that is longer. What waits at the gateway does not count: it is bound to no endpoint, since each
decision is made anew when there is room. Counting it spreads requests whose prefixes wait beside each other.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import PAGE_WAIT, PREFILL_RATE, QUEUED_TOKENS, Facts, RoutingRequest
from mini_infer_gateway.routing.seconds import queue_seconds, score_of


class QueueWait:
    """Seconds until the endpoint gets to this request."""

    name = "queue_wait"
    needs = (QUEUED_TOKENS, PREFILL_RATE, PAGE_WAIT)

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        return score_of(queue_seconds(facts))
