"""The routing policies that `--routing` names: which plugins, with which weights."""

from collections.abc import Sequence
from random import Random
from typing import Literal, get_args

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.routing.base import Picker, Scorer
from mini_infer_gateway.routing.filters.circuit_closed import CircuitClosed
from mini_infer_gateway.routing.filters.not_attempted import NotAttempted
from mini_infer_gateway.routing.filters.ready import Ready
from mini_infer_gateway.routing.filters.role import Role
from mini_infer_gateway.routing.pickers.highest_score import HighestScore
from mini_infer_gateway.routing.pickers.round_robin import RoundRobin
from mini_infer_gateway.routing.producers.load import EndpointLoad
from mini_infer_gateway.routing.producers.prefix_hits import PrefixHits
from mini_infer_gateway.routing.router import Router
from mini_infer_gateway.routing.scorers.cache_room import CacheRoom
from mini_infer_gateway.routing.scorers.cached_prefix import CachedPrefix
from mini_infer_gateway.routing.scorers.least_loaded import LeastLoaded
from mini_infer_gateway.routing.scorers.saturation import Saturation

Policy = Literal["prefix", "load", "random", "round-robin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def build_router(
    policy: Policy,
    index: PrefixIndex,
    ledger: LoadLedger,
    random: Random,
    *,
    block_size_tokens: int = BLOCK_SIZE_TOKENS,
) -> Router:
    """The router of a policy; all of them report hits, so that policies can be compared."""
    scorers: Sequence[tuple[Scorer, float]] = ()
    picker: Picker = RoundRobin() if policy == "round-robin" else HighestScore()
    if policy == "prefix":
        # The last two settle what hits leave open: idleness is worth a tenth of a prompt, an empty cache a fifth.
        scorers = ((CachedPrefix(), 1.0), (Saturation(), 1.0), (LeastLoaded(), 0.1), (CacheRoom(), 0.2))
    elif policy == "load":
        scorers = ((Saturation(), 1.0), (LeastLoaded(), 1.0))
    return Router(
        filters=(Ready(), Role(), NotAttempted(), CircuitClosed()),
        producers=(PrefixHits(index, block_size_tokens), EndpointLoad(ledger)),
        scorers=scorers,
        picker=picker,
        random=random,
    )
