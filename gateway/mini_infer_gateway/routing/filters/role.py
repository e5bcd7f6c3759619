"""Keeps endpoints that answer clients: a prefill pod computes prompts for others and answers no clients."""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class Role:
    """Drops the role `prefill`."""

    name = "role"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates that answer clients."""
        return [candidate for candidate in candidates if not candidate.computes_for_others]
