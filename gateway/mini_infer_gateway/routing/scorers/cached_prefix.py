"""Prefers who holds more of the prompt: the share of it that need not be computed again.

The part that many conversations share counts less, by the number of those that would share the cost of one more copy:
to stay with it for ever would fill one endpoint's cache and leave the others' empty. With more endpoints than sharers
it counts in full, since then each copy would serve few.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import CACHED_TOKENS, SHARED_TOKENS, SHARERS, Facts, RoutingRequest


class CachedPrefix:
    """Hit tokens over prompt tokens, shared ones discounted."""

    name = "cached_prefix"
    needs = (CACHED_TOKENS, SHARED_TOKENS, SHARERS)

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        tokens = max(1, request.prompt_tokens)
        endpoints = len(facts[CACHED_TOKENS])
        return [
            (cached - shared * max(0.0, 1.0 - endpoints / sharers)) / tokens
            for cached, shared, sharers in zip(facts[CACHED_TOKENS], facts[SHARED_TOKENS], facts[SHARERS], strict=True)
        ]
