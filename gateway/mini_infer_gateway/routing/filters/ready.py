"""Keeps endpoints that serve: their source reports them as ready and they do not drain."""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class Ready:
    """Drops endpoints that are starting, draining or gone."""

    name = "ready"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates that are ready."""
        return [candidate for candidate in candidates if candidate.ready]
