"""Reads the rates at which each candidate loads cached tokens from slower tiers."""

from collections.abc import Sequence

from mini_infer_gateway.fleet.tier_rates import TierRates as LearnedRates
from mini_infer_gateway.routing.base import DISK_RATE, HOST_RATE, Candidate, Features, RoutingRequest


class TierRates:
    """Provides the reported rates, in cached tokens a second."""

    name = "tier_rates"
    provides = (HOST_RATE, DISK_RATE)

    def __init__(self, rates: LearnedRates) -> None:
        self._rates = rates

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Features:
        """Reads the rates of each candidate."""
        host, disk = self._rates.all_tokens_per_s([candidate.name for candidate in candidates])
        return {HOST_RATE: host, DISK_RATE: disk}
