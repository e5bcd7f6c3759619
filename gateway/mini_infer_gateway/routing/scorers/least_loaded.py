"""Prefers who has less to do; meant with a small weight, for requests that no cache speaks for."""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import QUEUED_TOKENS, RUNNING, WAITING, Facts, RoutingRequest

REQUEST_TOKENS = 64
"""What a request in the batch weighs against prompt tokens in the queue."""


class LeastLoaded:
    """1 for an idle endpoint, 0 for the busiest."""

    name = "least_loaded"
    needs = (QUEUED_TOKENS, RUNNING, WAITING)

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        work = [
            queued + (running + waiting) * REQUEST_TOKENS
            for queued, running, waiting in zip(facts[QUEUED_TOKENS], facts[RUNNING], facts[WAITING], strict=True)
        ]
        most = max(work)
        return [1.0 - value / most if most else 1.0 for value in work]
