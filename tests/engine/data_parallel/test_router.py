"""What was sent where: counted from the choice on, until it ends, whatever the end."""

import random

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_contract.events import block_stored
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.data_parallel.router import EngineRouter


def request(name: str, tokens: list[int], **fields: object) -> Request:
    return Request(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(), **fields)  # type: ignore[arg-type]


def cache_of(tokens: list[int]) -> list[object]:
    whole = tokens[: len(tokens) // 16 * 16]
    return [block_stored(block_keys(whole, root_key("m")), None, whole)]


def test_router_spreads_load_and_follows_prefixes() -> None:
    router = EngineRouter(2)
    first, second = [*range(200)], [*range(500, 700)]
    assert [router.route(request(str(i), tokens), "m") for i, tokens in enumerate((first, second))] == [0, 1]
    assert router.route(request("2", [*second, 1, 2]), "m") == 1, "it is being computed there"
    router.ended(["0", "1", "2"])
    assert not router.has_work
    router.apply(1, cache_of(first))  # type: ignore[arg-type]
    assert router.route(request("3", [*first, 7]), "m") == 1, "it is held there"
    assert router.route(request("4", [*first, 7], cache_salt="s"), "m") == 0, "for others"


def test_a_resumed_stream_is_routed_by_prompt_and_output() -> None:
    router = EngineRouter(2)
    router.apply(1, cache_of([*range(64)]))  # type: ignore[arg-type]
    assert router.route(request("0", [*range(10)], resumed_token_ids=[*range(10, 70)]), "m") == 1


def test_router_uses_load_alone_when_there_is_no_prefix_cache() -> None:
    router = EngineRouter(2, caches_prefixes=False)
    assert [router.route(request(str(i), [*range(100)]), "m") for i in range(4)] == [0, 1, 0, 1]


def test_a_dead_engine_gets_no_requests_and_has_no_load() -> None:
    router = EngineRouter(2)
    assert router.route(request("0", [1, 2, 3]), "m") == 0
    router.died(0)
    assert not router.has_work
    assert router.engine_of("0") is None
    assert {router.route(request(str(i), [1, 2, 3]), "m") for i in range(1, 5)} == {1}
    router.died(1)
    assert router.route(request("9", [1]), "m") is None


def test_router_load_is_zero_when_all_requests_have_ended() -> None:
    rng, router = random.Random(1), EngineRouter(3)
    open_requests: list[str] = []
    for number in range(500):
        prompt = [rng.randrange(3)] * rng.randrange(1, 80)
        assert router.route(request(str(number), prompt), "m") is not None
        open_requests.append(str(number))
        for name in rng.sample(open_requests, min(3, len(open_requests))):
            router.record_output(name, rng.randrange(4))
        if rng.random() < 0.9:
            router.ended([open_requests.pop(rng.randrange(len(open_requests))), "unknown"])
    router.ended(open_requests)
    assert not router.has_work
    assert all((work.requests, work.queued_tokens, work.running_tokens) == (0, 0, 0) for work in router._work)
    assert router.blocks.depth(0, [1]) == 0
    assert not any(router.blocks._promised)
