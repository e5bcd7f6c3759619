"""Reads how fast each candidate computes prompts."""

from collections.abc import Sequence

from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.routing.base import PREFILL_RATE, Candidate, Facts, RoutingRequest


class PrefillRate:
    """Prompt tokens a second, as learned."""

    name = "prefill_rate"
    provides = (PREFILL_RATE,)

    def __init__(self, rates: PrefillRates) -> None:
        self._rates = rates

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Facts:
        """See base.Producer."""
        return {PREFILL_RATE: self._rates.all_tokens_per_s([candidate.name for candidate in candidates])}
