"""The routing policies that `--routing` names, with the plugins, weights and parameters of each."""

from collections.abc import Mapping
from random import Random
from typing import Literal, get_args

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.fleet.tier_rates import TierRates as LearnedTierRates
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.routing.pairing import Pairing
from mini_infer_gateway.routing.producers.load import EndpointLoad
from mini_infer_gateway.routing.producers.prefill_rate import PrefillRate
from mini_infer_gateway.routing.producers.prefix_hits import PrefixHits
from mini_infer_gateway.routing.producers.tier_rates import TierRates
from mini_infer_gateway.routing.producers.waiting_ahead import WaitingAhead
from mini_infer_gateway.routing.registry import Plugin, PolicySpec, make_router
from mini_infer_gateway.routing.router import Router

Policy = Literal["prefix", "load", "random", "round-robin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

SPECS: Mapping[Policy, PolicySpec] = {
    "prefix": PolicySpec(
        scorers=(
            Plugin("cached_prefix"),
            Plugin("queue_wait"),
            Plugin("decode_slots"),
            Plugin("cache_room", weight=0.3),
        )
    ),
    "load": PolicySpec(scorers=(Plugin("queue_wait"), Plugin("decode_slots"))),
    "random": PolicySpec(),
    "round-robin": PolicySpec(picker=Plugin("round_robin")),
}


def build_router(
    policy: Policy,
    index: PrefixIndex,
    ledger: LoadLedger,
    random: Random,
    *,
    rates: PrefillRates | None = None,
    tier_rates: LearnedTierRates | None = None,
    backlog: Backlog | None = None,
    pairing: Pairing | None = None,
    block_size_tokens: int = BLOCK_SIZE_TOKENS,
) -> Router:
    """Returns the router of a policy. All policies report cache hits, so that they can be compared."""
    producers = (
        PrefixHits(index, block_size_tokens),
        EndpointLoad(ledger),
        PrefillRate(rates or PrefillRates()),
        TierRates(tier_rates or LearnedTierRates()),
        WaitingAhead(Backlog() if backlog is None else backlog, ledger),  # an empty one is false
    )
    return make_router(SPECS[policy], producers, random, pairing)
