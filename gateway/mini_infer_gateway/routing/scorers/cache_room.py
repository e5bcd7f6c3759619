"""Prefers who holds less: new conversations fill all caches evenly, even when they come one at a time.

Without it the first endpoint to see a system prompt would draw every conversation that begins with it, and the others'
memory would stay empty. Meant with a weight well below a hit's: it speaks where hits do not.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import HELD_TOKENS, Facts, RoutingRequest


class CacheRoom:
    """1 for an empty cache, 0 for the fullest."""

    name = "cache_room"
    needs = (HELD_TOKENS,)

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        most = max(1.0, *facts[HELD_TOKENS])
        return [1.0 - held / most for held in facts[HELD_TOKENS]]
