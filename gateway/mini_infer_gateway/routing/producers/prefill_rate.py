"""Reads the prefill rate of each candidate."""

from collections.abc import Sequence

from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.routing.base import PREFILL_RATE, Candidate, Features, RoutingRequest


class PrefillRate:
    """Provides the learned rates, in prompt tokens a second."""

    name = "prefill_rate"
    provides = (PREFILL_RATE,)

    def __init__(self, rates: PrefillRates) -> None:
        self._rates = rates

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Features:
        """Reads the learned rate of each candidate."""
        return {PREFILL_RATE: self._rates.all_tokens_per_s([candidate.name for candidate in candidates])}
