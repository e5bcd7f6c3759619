"""Keeps endpoints that answer clients: a prefill pod computes prompts for others and never does."""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class Role:
    """Drops the role `prefill`."""

    name = "role"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """See base.Filter."""
        return [candidate for candidate in candidates if not candidate.computes_for_others]
