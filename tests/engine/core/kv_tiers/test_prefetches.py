"""Blocks of lower tiers are on the device when their prompt is scheduled, and take nothing from anybody for that."""

import random

import msgspec
import pytest

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers import prefetches
from mini_infer_engine.core.kv_tiers.stats import TierStats
from mini_infer_engine.core.kv_tiers.tiers import KVTiers
from mini_infer_engine.core.request import CachedTokens, Output, Request, SamplingParams
from tests.support.engine_world import make_engine
from tests.support.fake_runner import FakeRunner

PROMPT = [1, 2, 3, 4] * 40
NUM_PAGES = 48


class _Eager(random.Random):
    """Ends every copy at the next look."""

    def random(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    clock = Clock()
    monkeypatch.setattr("mini_infer_engine.core.engine.time", clock)
    return clock


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


def engine_with(num_pages: int = NUM_PAGES, **settings: object) -> tuple[Engine, FakeRunner]:
    return make_engine(num_pages, 16, 200, num_tier_pages=(200, 0), draw=_Eager(0), **settings)  # type: ignore[arg-type]


def request(name: str, prompt: list[int] = PROMPT, *, max_tokens: int = 2, **fields: object) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    made = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    return msgspec.structs.replace(made, **fields)


def finish(engine: Engine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    settle(engine)
    return outputs


def settle(engine: Engine) -> None:
    """Lets all copies end, as a core without work does."""
    while engine.write_behind():
        pass


def run(engine: Engine, one: Request) -> list[Output]:
    engine.add(one)
    return finish(engine)


def evict(engine: Engine) -> None:
    """Serves other prompts until nothing of PROMPT is on the device."""
    for number in range(5):
        run(engine, request(f"other {number}", [5 + number] * 160))


def cached(outputs: list[Output]) -> CachedTokens:
    (found,) = [output.cached_tokens for output in outputs if output.cached_tokens is not None]
    return found


def num_on_device(engine: Engine, prompt: list[int] = PROMPT) -> int:
    from mini_infer_contract.blocks import root_key

    return engine.scheduler.kv_cache.longest_cached(prompt, root_key("revision"))[1]


def host(engine: Engine) -> TierStats:
    return engine.stats().kv_tiers.tiers["host"]


def test_session_is_on_the_device_when_its_request_was_announced(clock: Clock) -> None:
    engine, _ = engine_with()
    run(engine, request("first#0", lease_s=600.0))
    clock.now_s += 601
    evict(engine)
    assert num_on_device(engine) == 0
    engine.prefetch(["first"], 10.0)
    settle(engine)
    assert num_on_device(engine) == 160
    found = cached(run(engine, request("again")))
    assert found == CachedTokens(host=144)
    assert (host(engine).prefetched_tokens, host(engine).prefetch_used_tokens) == (160, 144)
    clock.now_s += 11
    engine.write_behind()
    assert host(engine).prefetch_wasted_tokens == 16
    assert host(engine).hit_tokens == 144, "as many as prompts were told of"


def test_nothing_is_loaded_when_the_announced_request_is_unknown(clock: Clock) -> None:
    engine, _ = engine_with()
    run(engine, request("first#0"))  # without a lease no return is expected
    evict(engine)
    engine.prefetch(["first", "", "nobody#0"], 10.0)
    settle(engine)
    assert host(engine).prefetched_tokens == 0


def test_session_is_loaded_when_its_return_nears(clock: Clock) -> None:
    engine, _ = engine_with()
    run(engine, request("first#0", lease_s=30.0, returns_s=5.0))
    engine.scheduler.kv_cache.pool.give_up(engine.scheduler.kv_cache.longest_cached(PROMPT, _root())[0])
    evict(engine)
    assert num_on_device(engine) == 0
    assert engine.next_due_s == clock.now_s + 5
    clock.now_s += 4.9
    settle(engine)
    assert num_on_device(engine) == 0
    clock.now_s += 0.2
    settle(engine)
    assert num_on_device(engine) == 160


def test_an_expected_session_is_not_loaded_when_most_pages_are_in_use(clock: Clock) -> None:
    engine, _ = engine_with(max_num_seqs=4)
    run(engine, request("first#0", lease_s=30.0, returns_s=5.0))
    engine.scheduler.kv_cache.pool.give_up(engine.scheduler.kv_cache.longest_cached(PROMPT, _root())[0])
    evict(engine)
    for number in range(3):
        engine.add(request(f"running {number}", [40 + number] * 160, max_tokens=30))
    engine.step()
    engine.step()
    assert engine.scheduler.kv_cache.usage > 0.5
    clock.now_s += 6
    engine.step()
    assert host(engine).prefetched_tokens == 0
    finish(engine)
    clock.now_s += 2
    settle(engine)
    assert num_on_device(engine) == 160


def _root() -> bytes:
    from mini_infer_contract.blocks import root_key

    return root_key("revision")


def test_unused_blocks_are_evicted_first_when_the_session_did_not_return(clock: Clock) -> None:
    engine, _ = engine_with()
    run(engine, request("first#0", lease_s=1.0))
    clock.now_s += 2
    evict(engine)
    engine.prefetch(["first"], 10.0)
    settle(engine)
    clock.now_s += 11
    settle(engine)
    assert host(engine).prefetch_wasted_tokens == 160
    pool = engine.scheduler.kv_cache.pool
    pages = engine.scheduler.kv_cache.longest_cached(PROMPT, _root())[0]
    assert set(pool.least_recently_used(len(pages))) == set(pages)
    assert host(engine).hit_tokens == 0


def test_prefetch_takes_no_page_of_a_lease_that_ends_sooner(clock: Clock) -> None:
    engine, _ = engine_with()
    run(engine, request("first#0", lease_s=1.0))
    clock.now_s += 2
    for number in range(5):
        run(engine, request(f"other {number}", [5 + number] * 160, lease_s=20.0 + number))
    engine.scheduler.kv_cache.pool._blank.clear()
    assert num_on_device(engine) == 0
    engine.prefetch(["first"], 60.0)
    assert host(engine).prefetched_tokens == 0
    engine.prefetch(["first"], 10.0)
    assert host(engine).prefetched_tokens == 160


def test_prefetch_evicts_nothing_that_no_lower_tier_has(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with()
    run(engine, request("first#0", lease_s=1.0))
    clock.now_s += 2
    evict(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine._tiers, "write_behind", lambda **_: False)
        for number in range(5):
            run(engine, request(f"new {number}", [60 + number] * 160, lease_s=60.0 + number))
    engine.scheduler.kv_cache.pool._blank.clear()
    engine.prefetch(["first"], 10.0)
    assert host(engine).prefetched_tokens == 0
    settle(engine)
    engine.prefetch(["first"], 10.0)
    assert host(engine).prefetched_tokens == 160


def test_prefetches_take_a_share_of_the_pages(clock: Clock) -> None:
    engine, _ = engine_with()
    for number in range(6):
        run(engine, request(f"session {number}#0", [20 + number] * 160, lease_s=0.5))
        clock.now_s += 1
    evict(engine)
    engine.prefetch([f"session {number}" for number in range(6)], 10.0)
    settle(engine)
    assert 0 < host(engine).prefetched_tokens <= prefetches.MOST_SHARE * NUM_PAGES * 16


def test_waiting_request_is_read_ahead_when_all_slots_are_taken(clock: Clock) -> None:
    engine, _ = engine_with(max_num_seqs=1)
    run(engine, request("first"))
    evict(engine)
    engine.add(request("long", [40] * 20, max_tokens=100))
    engine.step()
    engine.add(request("again"))
    for _ in range(20):
        engine.step()
    assert "again" in {one.request.request_id for one in engine.scheduler.waiting}
    assert num_on_device(engine) == 144
    assert cached([one for one in finish(engine) if one.request_id == "again"]) == CachedTokens(host=144)
    assert host(engine).prefetch_used_tokens == 144


def test_waiting_request_is_not_read_ahead_when_a_policy_evicts_its_tokens(clock: Clock) -> None:
    engine, _ = engine_with(max_num_seqs=1)
    run(engine, request("first"))
    evict(engine)
    engine.add(request("long", [40] * 20, max_tokens=100))
    engine.step()
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, kv_policy="streaming-llm", kv_budget=64)
    engine.add(request("again", sampling=sampling))
    for _ in range(20):
        engine.step()
    assert num_on_device(engine) == 0
    assert cached([one for one in finish(engine) if one.request_id == "again"]) == CachedTokens()


def test_nothing_leaks_when_a_pass_fails_while_blocks_are_prefetched(clock: Clock) -> None:
    engine, runner = engine_with()
    run(engine, request("first#0", lease_s=1.0))
    clock.now_s += 2
    evict(engine)
    engine.add(request("running", [40] * 20, max_tokens=100))
    engine.step()
    engine.prefetch(["first"], 10.0)
    runner.collect_error = RuntimeError("told to fail")
    finish(engine)
    pool = engine.scheduler.kv_cache.pool
    assert pool.references == [0] * NUM_PAGES
    assert pool.num_free == NUM_PAGES


def test_page_that_comes_back_changed_is_wasted_and_not_hit(clock: Clock) -> None:
    engine, runner = engine_with()
    run(engine, request("first#0", lease_s=1.0))
    clock.now_s += 2
    evict(engine)
    assert runner.host_memory is not None
    tiers = engine._tiers
    assert isinstance(tiers, KVTiers)
    session = tiers._sessions.named("first")
    assert session is not None
    page = tiers._host.page(session.keys[3])
    assert page is not None
    runner.host_memory.pages[page][0] = 12345
    engine.prefetch(["first"], 10.0)
    settle(engine)
    assert num_on_device(engine) == 48
    assert host(engine).prefetch_wasted_tokens == 160 - 48
    assert cached(run(engine, request("again"))).host == 48


def test_prefetches_are_forgotten_when_the_prefix_cache_is_reset(clock: Clock) -> None:
    engine, _ = engine_with()
    run(engine, request("first#0", lease_s=1.0))
    clock.now_s += 2
    evict(engine)
    engine.prefetch(["first"], 10.0)
    assert engine.reset_prefix_cache()
    settle(engine)
    assert num_on_device(engine) == 0
    assert engine.scheduler.kv_cache.pool.references == [0] * NUM_PAGES
    assert engine.next_due_s == float("inf")
