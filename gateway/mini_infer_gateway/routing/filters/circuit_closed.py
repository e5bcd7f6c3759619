"""Keeps endpoints whose breaker is closed, unless all are open: a breaker chooses between pods, it never turns away.

With one pod left a failed try is worth more than a certain 503.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class CircuitClosed:
    """Drops open breakers where something else is left."""

    name = "circuit_closed"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """See base.Filter."""
        whole = [candidate for candidate in candidates if not candidate.circuit_open]
        return whole or candidates
