"""Keeps endpoints that have not failed this request yet: a retry goes elsewhere."""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class NotAttempted:
    """Drops the names in `request.attempted`."""

    name = "not_attempted"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates that the request has not attempted."""
        if not request.attempted:
            return candidates
        return [candidate for candidate in candidates if candidate.name not in request.attempted]
