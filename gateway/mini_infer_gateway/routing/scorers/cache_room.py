"""Prefers who holds less: new conversations fill all caches evenly, even when they come one at a time.

Without it the first endpoint to see a system prompt would draw every conversation that begins with it, and the others'
memory would stay empty. What is evicted for a prompt may have to be computed once more, so the unit is the time that
this prompt takes, less as far as a cache is empty; with a weight well below 1, since most of it never comes back.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import HELD_TOKENS, PREFILL_RATE, Facts, RoutingRequest
from mini_infer_gateway.routing.seconds import score_of


class CacheRoom:
    """Seconds to compute this prompt, by how full the cache is beside the fullest."""

    name = "cache_room"
    needs = (HELD_TOKENS, PREFILL_RATE)

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        tokens_by_held = max(1, request.prompt_tokens) / max(1.0, *facts[HELD_TOKENS])
        tables = (facts[HELD_TOKENS], facts[PREFILL_RATE])
        return score_of([tokens_by_held * held / rate for held, rate in zip(*tables, strict=True)])
