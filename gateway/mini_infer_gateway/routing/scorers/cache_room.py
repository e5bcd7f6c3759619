"""Prefers endpoints with less in their cache: new conversations fill all caches evenly, even if they arrive one at a
time.

Without this scorer, the first endpoint to see a system prompt would attract every conversation that begins with it, and
the others' memory would stay empty. What is evicted for a prompt may have to be computed again, so the unit is the time
that this prompt takes, reduced by how empty a cache is. The weight is well below 1, since most evicted blocks are never
needed again.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import PREFILL_RATE, STORED_TOKENS, Features, RoutingRequest
from mini_infer_gateway.routing.seconds import score_of


class CacheRoom:
    """Scores the seconds to compute this prompt, scaled by the fill of the cache relative to the fullest one."""

    name = "cache_room"
    needs = (STORED_TOKENS, PREFILL_RATE)

    def score(self, request: RoutingRequest, features: Features) -> Sequence[float]:
        """Scores each candidate by its cached tokens."""
        tokens_by_stored = max(1, request.prompt_tokens) / max(1.0, *features[STORED_TOKENS])
        tables = (features[STORED_TOKENS], features[PREFILL_RATE])
        return score_of([tokens_by_stored * stored / rate for stored, rate in zip(*tables, strict=True)])
