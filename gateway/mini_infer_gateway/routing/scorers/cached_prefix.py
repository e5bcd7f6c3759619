"""Prefers who has less of the prompt to compute: the seconds that this takes, and what it costs everybody else.

A token that is computed although another endpoint holds it delays whatever waits in the fleet, and more so the busier
the fleet is. So missing tokens count once for this request, at the endpoint's own rate, and those that another endpoint
holds `least_price` to `least_price + busy_price` times for others, at the mean rate: with idle endpoints around, a hit
is given up to start sooner; once all are busy, work that need not be done is what makes queues grow, and a request
waits for its prefix a good while. Tokens that nobody holds are work wherever they go: there is no price for others on
them, so an idle endpoint is not kept idle for being slow.

While no endpoint has anything queued, the part of a hit that many conversations share counts less, by the number of
those that would share the cost of one more copy: to stay with it for ever would fill one endpoint's cache and leave the
others' empty. With more endpoints than sharers it counts in full, since then each copy would serve few.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import (
    CACHED_TOKENS,
    PREFILL_RATE,
    QUEUED_TOKENS,
    SHARED_TOKENS,
    SHARERS,
    Facts,
    RoutingRequest,
)
from mini_infer_gateway.routing.seconds import busy_share, score_of


class CachedPrefix:
    """Seconds for the missing tokens, each counted as often as it delays somebody."""

    name = "cached_prefix"
    needs = (CACHED_TOKENS, SHARED_TOKENS, SHARERS, QUEUED_TOKENS, PREFILL_RATE)

    def __init__(self, least_price: float = 1.5, busy_price: float = 4.0) -> None:
        self._least_price, self._busy_price = least_price, busy_price

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        endpoints, busy = len(facts[CACHED_TOKENS]), busy_share(facts)
        price = self._least_price + self._busy_price * busy
        prompt, rates = request.prompt_tokens, facts[PREFILL_RATE]
        missing = [prompt - cached if cached < prompt else 1.0 for cached in facts[CACHED_TOKENS]]
        if not busy and any(facts[SHARED_TOKENS]):
            common = zip(missing, facts[SHARED_TOKENS], facts[SHARERS], strict=True)
            missing = [own + shared * max(0.0, 1.0 - endpoints / sharers) for own, shared, sharers in common]
        least, price_s = min(missing), price * endpoints / sum(rates)
        return score_of([own / rate + price_s * (own - least) for own, rate in zip(missing, rates, strict=True)])
