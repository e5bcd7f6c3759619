"""Keeps endpoints whose breaker is closed, unless all are open: a breaker only chooses between pods.

If one pod is left, an attempt that may fail is worth more than a certain 503.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class CircuitClosed:
    """Drops endpoints with an open breaker if any other is left."""

    name = "circuit_closed"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates whose breaker is closed, or all candidates if there is none."""
        whole = [candidate for candidate in candidates if not candidate.circuit_open]
        return whole or candidates
