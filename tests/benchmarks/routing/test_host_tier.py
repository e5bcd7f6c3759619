"""Main memory of modelled engines: what is evicted comes back, at the price of its load, and nothing is lost."""

import pytest

from benchmarks.routing.engine_model import Change, EngineModel, EngineShape
from benchmarks.routing.host_tier import HostShape, HostTier
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.recorded_agents import recorded_agents
from mini_infer_contract.events import MEDIUM_GPU, MEDIUM_HOST
from tests.benchmarks.routing.test_engine_model import BLOCK, Run, chats


def engine_of(kv_blocks: int, host: HostShape, run: Run) -> EngineModel:
    shape = EngineShape(kv_blocks, BLOCK, QWEN_7B_H200, max_num_seqs=32, token_budget=1024, host=host)
    return EngineModel("engine", shape, run.on_first, run.on_finish)


def test_loads_follow_each_other_and_are_declined_when_computing_is_faster() -> None:
    tier = HostTier(HostShape(8, tokens_per_s=1600.0, latency_s=1.0), block_tokens=16, compute_s_per_token=0.1)
    assert tier.evicted([1, 2, 3]) == ([1, 2, 3], [])
    assert tier.match([1, 2, 9, 3]) == 2
    assert tier.load([1, 2], now_s=10.0) == pytest.approx(11.02)
    assert tier.load([3], now_s=10.0) == pytest.approx(12.03)
    assert tier.evicted([4, 5, 6, 7, 8, 9]) == ([4, 5, 6, 7, 8, 9], [1])
    assert tier.match([1, 2]) == 0
    slow = HostTier(HostShape(8, tokens_per_s=5.0, latency_s=1.0), block_tokens=16, compute_s_per_token=0.1)
    slow.evicted([1])
    assert slow.match([1]) == 0
    none = HostTier(HostShape(), block_tokens=16, compute_s_per_token=0.1)
    assert none.evicted([1]) == ([], [])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gap_s", [0.02, 0.2])
def test_all_requests_end_and_reuse_is_nearly_all_when_main_memory_has_the_rest(seed: int, gap_s: float) -> None:
    requests = chats(seed, 120, gap_s)
    cached, means = {}, {}
    for name, blocks, host in (("small", 300, 0), ("host", 300, 50_000), ("large", 50_000, 0)):
        run = Run()
        engine = engine_of(blocks, HostShape(host), run)
        run.through(engine, requests)
        assert set(run.ended) == {request.number for request in requests}
        assert engine._private == 0
        assert not engine._refs
        cached[name] = sum(tokens for _, tokens in run.ended.values())
        means[name] = sum(run.first[one.number] - one.arrival_s for one in requests) / len(requests)
    assert cached["small"] < 0.7 * cached["large"]
    assert cached["host"] > 0.9 * cached["large"]
    assert means["host"] < means["small"]


def test_events_tell_where_each_block_is() -> None:
    run = Run()
    engine = engine_of(300, HostShape(400), run)
    known: dict[str, set[int]] = {MEDIUM_GPU: set(), MEDIUM_HOST: set()}

    def take(changes: list[Change]) -> None:
        for change in changes:
            if change.is_stored:
                parent, blocks = change.what
                assert parent < 0 or any(parent in blocks_of for blocks_of in known.values())
                assert not known[change.medium].intersection(blocks)
                known[change.medium].update(blocks)
            else:
                assert known[change.medium].issuperset(change.what)
                known[change.medium].difference_update(change.what)

    arrivals = list(reversed(chats(5, 150, 0.05)))
    while arrivals or engine.next_s is not None:
        if arrivals and (engine.next_s is None or arrivals[-1].arrival_s < engine.next_s):
            request = arrivals.pop()
            engine.add(request, request.arrival_s)
        else:
            engine.wake(engine.next_s)
        take(engine.take_events())
        assert known[MEDIUM_GPU] == {*engine._refs, *engine._cached}
        assert known[MEDIUM_HOST] == {*engine._host._blocks}
    assert known[MEDIUM_HOST]


def test_recorded_sessions_go_on_with_their_answers() -> None:
    workload = recorded_agents(1, sessions=5, turns=6)
    assert workload == recorded_agents(1, sessions=5, turns=6)
    assert [one.number for one in workload.requests] == list(range(len(workload.requests)))
    assert len(workload.follows) == len(workload.requests) - 5
    for number, follow in workload.follows.items():
        (before,) = follow.numbers
        assert workload.requests[before].session == workload.requests[number].session
        assert before < number
