"""A simulation: growing chats on two endpoints whose caches together hold 70 % of what the chats need.

Beside them one cache of the same total size; what matters is the share of its hits that routing keeps.
"""

from random import Random

import pytest

from mini_infer_contract.blocks import block_keys
from mini_infer_contract.events import block_removed, block_stored
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root
from mini_infer_gateway.routing.base import Candidate, PromptKeys, RoutingRequest
from mini_infer_gateway.routing.policies import Policy, build_router
from tests.support.fake_cache import FakeCache

CHATS, TURNS, BLOCK = 20, 8, 16


def simulate(policy: Policy, system_tokens: int, at_once: int, seed: int) -> float:
    """Hit tokens over those of one cache of the same total size."""
    random = Random(seed)

    def text(tokens: int) -> list[int]:
        return [random.randrange(4000) for _ in range(tokens)]

    system = text(system_tokens)
    turns = [[text(random.randrange(40, 160)) for _ in range(TURNS)] for _ in range(CHATS)]
    needed = (system_tokens + sum(len(turn) for chat in turns for turn in chat)) // BLOCK
    index, ledger = PrefixIndex(100_000), LoadLedger()
    router = build_router(policy, index, ledger, Random(seed))
    endpoints = [Endpoint(name=name, url="", model="m") for name in ("a", "b")]
    caches = {endpoint.name: FakeCache(int(needed * 0.35)) for endpoint in endpoints}
    one = FakeCache(int(needed * 0.7))
    candidates = [Candidate(endpoint, index="exact", assets_revision="r") for endpoint in endpoints]
    chats = [list(system) for _ in range(CHATS)]
    order = [chat for chat in range(CHATS) for _ in range(TURNS)]
    random.shuffle(order)
    hit_blocks = best_blocks = 0
    flights = []
    for number, chat in enumerate(order):
        chats[chat] += turns[chat].pop()
        keys = block_keys(chats[chat], prompt_root())
        request = RoutingRequest("m", len(chats[chat]), {"r": PromptKeys(len(chats[chat]), (keys,))})
        decision = router.route(request, candidates, float(number))
        assert decision is not None
        name = decision.decode.name
        hit, stored, evicted = caches[name].serve(keys)
        assert decision.hit_tokens == hit * BLOCK
        hit_blocks += hit
        best_blocks += one.serve(keys)[0]
        if stored:
            tokens = chats[chat][hit * BLOCK : len(keys) * BLOCK]
            index.apply(name, [block_stored(stored, keys[hit - 1] if hit else None, tokens)])
        if evicted:
            index.apply(name, [block_removed(evicted)])
        flights.append(ledger.start(name, str(number), (len(keys) - hit) * BLOCK))
        if len(flights) >= at_once:
            ledger.finish(flights.pop(random.randrange(len(flights))))
    return hit_blocks / best_blocks


@pytest.mark.parametrize("system_tokens", [0, 64, 400])
@pytest.mark.parametrize("at_once", [1, 8, 20])
def test_prefix_routing_keeps_95_percent_of_hits_when_chats_grow(system_tokens: int, at_once: int) -> None:
    kept = [simulate("prefix", system_tokens, at_once, seed) for seed in range(3)]
    assert sum(kept) / 3 >= 0.95
    assert simulate("round-robin", system_tokens, at_once, 0) < min(kept)
