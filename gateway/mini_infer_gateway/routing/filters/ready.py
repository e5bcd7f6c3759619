"""Keeps endpoints that serve: their source calls them ready and they do not drain."""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class Ready:
    """Drops what is starting, draining or gone."""

    name = "ready"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """See base.Filter."""
        return [candidate for candidate in candidates if candidate.ready]
