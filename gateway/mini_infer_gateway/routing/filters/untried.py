"""Keeps endpoints that have not failed this request yet: a retry goes elsewhere."""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import Candidate, RoutingRequest


class Untried:
    """Drops the names in `request.tried`."""

    name = "untried"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """See base.Filter."""
        if not request.tried:
            return candidates
        return [candidate for candidate in candidates if candidate.endpoint.name not in request.tried]
