"""Prefers endpoints that can begin sooner, by the seconds that they need for their queued prompt tokens.

If an endpoint lacks pages or slots, tokens are no measure: the wait is the pause between its latest placements, if that
is longer. Requests that wait at the gateway do not count: they are bound to no endpoint, since each decision is made
again when there is room. Counting them would spread requests whose prefixes wait together.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import PAGE_WAIT, PREFILL_RATE, QUEUED_TOKENS, Features, RoutingRequest
from mini_infer_gateway.routing.seconds import queue_seconds, score_of


class QueueWait:
    """Scores the seconds until the endpoint starts this request."""

    name = "queue_wait"
    needs = (QUEUED_TOKENS, PREFILL_RATE, PAGE_WAIT)

    def score(self, request: RoutingRequest, features: Features) -> Sequence[float]:
        """Scores each candidate by its queue."""
        return score_of(queue_seconds(features))
