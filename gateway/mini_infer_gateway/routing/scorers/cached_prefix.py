"""Prefers endpoints that have less of the prompt to compute: by the seconds that this takes, and its cost for others.

A token that is computed although another endpoint has it cached delays whatever waits in the fleet, the more so the
busier the fleet is. Missing tokens therefore count once for this request, at the endpoint's own rate. Those that
another endpoint has cached count `least_price` to `least_price + busy_price` times for others, at the mean rate. With
idle endpoints available, a hit is given up to start sooner; once all are busy, avoidable work is what makes queues
grow, and a request waits a good while for its prefix. Tokens that no endpoint has cached are work wherever they go:
they have no price for others, so an idle endpoint is not kept idle for being slow. A cached token that has to be
loaded from main memory or a disk counts the seconds of its load, for this request alone.

While no endpoint has anything queued, the part of a hit that many conversations share counts less, by the number of
those that would share the cost of one more copy: always staying with it would fill one endpoint's cache and leave the
others' empty. With more endpoints than sharers it counts in full, since each copy would then serve few.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import (
    CACHED_TOKENS,
    DISK_RATE,
    DISK_TOKENS,
    HOST_RATE,
    HOST_TOKENS,
    PREFILL_RATE,
    QUEUED_TOKENS,
    SHARED_TOKENS,
    SHARERS,
    Features,
    RoutingRequest,
)
from mini_infer_gateway.routing.seconds import busy_share, load_seconds, score_of


class CachedPrefix:
    """Scores the seconds for the missing tokens, each counted as often as it delays a request."""

    name = "cached_prefix"
    needs = (
        CACHED_TOKENS,
        HOST_TOKENS,
        DISK_TOKENS,
        HOST_RATE,
        DISK_RATE,
        SHARED_TOKENS,
        SHARERS,
        QUEUED_TOKENS,
        PREFILL_RATE,
    )

    def __init__(self, least_price: float = 1.5, busy_price: float = 4.0) -> None:
        self._least_price, self._busy_price = least_price, busy_price

    def score(self, request: RoutingRequest, features: Features) -> Sequence[float]:
        """Scores each candidate by its missing tokens."""
        endpoints, busy = len(features[CACHED_TOKENS]), busy_share(features)
        price = self._least_price + self._busy_price * busy
        prompt, rates = request.prompt_tokens, features[PREFILL_RATE]
        missing = [prompt - cached if cached < prompt else 1.0 for cached in features[CACHED_TOKENS]]
        if not busy and any(features[SHARED_TOKENS]):
            common = zip(missing, features[SHARED_TOKENS], features[SHARERS], strict=True)
            missing = [own + shared * max(0.0, 1.0 - endpoints / sharers) for own, shared, sharers in common]
        least, price_s = min(missing), price * endpoints / sum(rates)
        each = zip(missing, rates, load_seconds(features), strict=True)
        return score_of([own / rate + price_s * (own - least) + load_s for own, rate, load_s in each])
