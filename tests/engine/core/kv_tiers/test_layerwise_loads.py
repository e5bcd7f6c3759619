"""Blocks of main memory are loaded while the pass of the tokens behind them computes. Nobody sees what came changed."""

import random
from typing import Any

import pytest

from mini_infer_contract.events import MEDIUM_GPU, BlockStored
from mini_infer_engine.config.model.kv_groups import kv_cache_config
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers import tier
from mini_infer_engine.core.request import CachedTokens, Output, Request, SamplingParams
from mini_infer_engine.core.sequence import State
from tests.engine.core.kv_tiers.test_tiers import LENGTH, NUM_PAGES, PROMPT, _Eager, cached, others, run
from tests.engine.core.test_constraints import DIGITS, Bench
from tests.engine.core.test_engine_events import SETUPS, TIERED, WINDOWED, TieredWorld, break_tier, make_world
from tests.support.engine_world import make_engine
from tests.support.fake_runner import FakeRunner, expected_tokens
from tests.support.fake_tiers import FakeHostMemory, FakeLayerwiseLoad

WINDOW = 20
"""Tokens: the last two pages of a prefix."""


def warm_engine(*, num_pages: int = NUM_PAGES, **settings: object) -> tuple[Engine, FakeRunner, FakeHostMemory]:
    """Returns an engine whose main memory has a prompt that the device has evicted."""
    engine, runner = make_engine(
        num_pages, 16, LENGTH, num_tier_pages=(60, 0), loads_by_layer=True, draw=_Eager(0), **settings
    )
    run(engine, PROMPT, "first")
    others(engine, 1 + num_pages // 10)
    engine.take_events()
    assert runner.host_memory is not None
    return engine, runner, runner.host_memory


def warm_windows(
    windows: tuple[int | None, ...] = (None, WINDOW), **settings: object
) -> tuple[Engine, FakeRunner, FakeHostMemory]:
    """Returns an engine whose main memory alone has a prompt, in all KV groups."""
    engine, runner = make_engine(
        60, 16, LENGTH, num_tier_pages=(120, 0), loads_by_layer=True, draw=_Eager(0),
        kv_cache=kv_cache_config(windows, LENGTH), **settings,
    )  # fmt: skip
    engine.add(request("first"))
    drain(engine)
    while engine.write_behind():
        pass
    engine.scheduler.kv_cache.reset_prefix_cache()
    engine.take_events()
    assert runner.host_memory is not None
    return engine, runner, runner.host_memory


def request(name: str, prompt: list[int] = PROMPT, max_tokens: int = 4, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, **fields)


def drain(engine: Engine, num_steps: int = 1000) -> dict[str, list[int]]:
    """Runs so many steps, or until nothing is left. Returns the tokens by request."""
    made: dict[str, list[int]] = {}
    while engine.has_work and num_steps:
        num_steps -= 1
        for output in engine.step():
            assert not output.error, output.error
            made.setdefault(output.request_id, []).extend(output.token_ids)
    return made


def stored_on_device(engine: Engine) -> int:
    events = engine.take_events()
    return sum(
        len(event.block_hashes) for event in events if isinstance(event, BlockStored) and event.medium == MEDIUM_GPU
    )


def check_nothing_is_left(engine: Engine) -> None:
    while engine.write_behind():
        pass
    pool = engine.scheduler.kv_cache.pool
    assert not any(pool.references)
    assert not engine._tiers.are_loading


@pytest.mark.parametrize("depth", [0, 1])
def test_first_pass_follows_the_load_when_the_prompt_is_alone(depth: int) -> None:
    engine, runner, memory = warm_engine(step_depth=depth)
    num_batches = len(runner.batches)
    outputs = run(engine, PROMPT, "again")
    assert cached(outputs) == CachedTokens(host=144)
    assert outputs[-1].num_cached_tokens == 144
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, 1)
    first = runner.batches[num_batches]
    assert [row.start for row in first.rows] == [144]
    assert len(first.layerwise_loads) == 1
    assert not any(batch.layerwise_loads for batch in runner.batches[num_batches + 1 :])
    assert engine.stats().kv_tiers.tiers["host"].hit_tokens == 144
    assert engine.stats().cached_prompt_tokens == 144
    assert engine.load().host_tokens_per_s > 0
    check_nothing_is_left(engine)


def test_pages_are_loaded_before_the_pass_when_the_memory_cannot_load_by_layer() -> None:
    engine, _, memory = warm_engine()
    memory.loads_by_layer = False
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(host=144)
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, 0)


def test_blocks_are_hit_only_after_the_commit_when_they_were_loaded_with_a_pass() -> None:
    engine, _, memory = warm_engine(step_depth=1)
    engine.add(request("first again"))
    engine.step()  # launches the pass; the next step launches another one, and commits it
    engine.add(request("too"))
    assert stored_on_device(engine) == 0
    assert [sequence.request.request_id for sequence in engine.scheduler.waiting] == ["too"]
    (first,) = engine.step()
    assert [sequence.request.request_id for sequence in engine.scheduler.waiting] == ["too"], "it waits for the commit"
    assert stored_on_device(engine) == 10
    made = drain(engine)
    made["first again"][:0] = first.token_ids
    assert made == {name: expected_tokens(request(name), LENGTH) for name in ("first again", "too")}
    assert memory.num_loads == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_text_is_right_and_nothing_is_cached_when_a_page_came_changed(depth: int) -> None:
    engine, _, memory = warm_engine(step_depth=depth)
    index = engine._tiers._host  # type: ignore[union-attr]  # it has tiers
    keys = [record.key for record in index.records if record.blocks[0].packed_tokens[:4] == b"\1\0\0\0"]
    page = index.page(keys[4])
    assert page is not None
    memory.pages[page][3] = 12345
    engine.add(request("again"))
    seen = list[Output]()
    while engine.has_work:
        seen += engine.step()
        if not seen and not engine._in_flight:
            assert stored_on_device(engine) == 0, "void blocks can be hit"
    assert [token for output in seen for token in output.token_ids] == expected_tokens(request("again"), LENGTH)
    assert cached(seen) == CachedTokens()
    stats = engine.stats()
    assert (stats.kv_tiers.tiers["host"].mismatches, stats.kv_tiers.tiers["host"].hit_tokens) == (1, 0)
    assert stats.cached_prompt_tokens == 0
    assert stats.preemptions == 1
    assert memory.num_layerwise_loads == 1
    check_nothing_is_left(engine)
    others(engine, 2)
    assert cached(run(engine, PROMPT, "stored anew")) == CachedTokens(host=144)


def test_tier_is_off_when_three_pages_came_changed() -> None:
    engine, _, memory = warm_engine()
    for number in range(tier.MOST_MISMATCHES):
        others(engine, 2)
        for cells in memory.pages.values():
            cells[0] = 1
        assert cached(run(engine, PROMPT, f"again {number}")).host == 0
    assert memory.num_layerwise_loads >= tier.MOST_MISMATCHES
    assert not engine.stats().kv_tiers.tiers["host"].is_on


def fail_to_begin(memory: FakeHostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> FakeLayerwiseLoad:
        raise OSError("no thread is left")

    monkeypatch.setattr(memory, "load_layerwise", fail)


def fail_at_a_layer(memory: FakeHostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_layer = FakeLayerwiseLoad._copy_layer

    def fail(load: FakeLayerwiseLoad, layer: int) -> None:
        memory.error = "a bad bank" if layer == 1 else ""
        copy_layer(load, layer)

    monkeypatch.setattr(FakeLayerwiseLoad, "_copy_layer", fail)


@pytest.mark.parametrize("fail", [fail_to_begin, fail_at_a_layer])
@pytest.mark.parametrize("depth", [0, 1])
def test_only_the_load_is_lost_when_copies_fail(fail: Any, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, memory = warm_engine(num_pages=40, step_depth=depth)
    engine.add(request("beside", [30, 31] * 20, max_tokens=12))
    before = drain(engine, 3)
    fail(memory, monkeypatch)
    engine.add(request("again"))
    made = drain(engine)
    assert made["again"] == expected_tokens(request("again"), LENGTH)
    assert before["beside"] + made["beside"] == expected_tokens(request("beside", [30, 31] * 20, max_tokens=12), LENGTH)
    stats = engine.stats()
    assert stats.failed_passes == 0
    assert (stats.kv_tiers.tiers["host"].is_on, stats.kv_tiers.tiers["host"].errors) == (False, 1)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_changed", [False, True])
def test_nothing_is_left_when_the_request_is_aborted(num_steps: int, depth: int, is_changed: bool) -> None:
    engine, _, memory = warm_engine(step_depth=depth)
    if is_changed:
        for cells in memory.pages.values():
            cells[0] = 1
    engine.add(request("again"))
    for _ in range(num_steps):
        engine.step()
    engine.abort("again")
    assert drain(engine) == {}
    check_nothing_is_left(engine)
    made = run(engine, PROMPT, "once more")
    assert made[-1].finish_reason == "length"


@pytest.mark.parametrize("warm", [warm_engine, warm_windows])
@pytest.mark.parametrize("what", ["launch", "collect"])
@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_is_left_when_the_pass_fails(warm: Any, what: str, depth: int) -> None:
    engine, runner, memory = warm(step_depth=depth)
    setattr(runner, f"{what}_error", RuntimeError("told to fail"))
    engine.add(request("again"))
    errors = []
    while engine.has_work:
        errors += [output.error for output in engine.step() if output.error]
    assert len(errors) == 1
    check_nothing_is_left(engine)
    assert cached(run(engine, PROMPT, "once more")).host == 144
    assert memory.num_layerwise_loads == 2


@pytest.mark.parametrize("warm", [warm_engine, warm_windows])
def test_sequence_goes_on_when_it_is_preempted_while_its_blocks_come(warm: Any) -> None:
    engine, _, memory = warm(step_depth=1)
    engine.add(request("again"))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.in_flight
    engine.scheduler.leave(sequence, State.PREEMPTED)
    assert drain(engine) == {"again": expected_tokens(request("again"), LENGTH)}
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, 1)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_changed", [False, True])
def test_output_keeps_to_its_grammar_when_the_pass_follows_a_load(depth: int, is_changed: bool) -> None:
    bench, name = Bench(depth=depth, num_tier_pages=60), "long " * 30
    memory = bench.runner.host_memory
    assert memory is not None

    def ask() -> str:
        bench.add(name, DIGITS, temperature=1.0)
        return bench.run()[name].text

    expected = ask()
    while bench.engine.write_behind():
        pass
    bench.engine.scheduler.kv_cache.reset_prefix_cache()
    if is_changed:
        for cells in memory.pages.values():
            cells[0] = 1
    assert ask() == expected
    assert expected.isdigit()
    assert memory.num_layerwise_loads == 1
    assert bench.engine.stats().kv_tiers.tiers["host"].mismatches == is_changed


def test_pages_are_loaded_before_the_pass_when_others_see_more_than_tokens() -> None:
    engine, _, memory = warm_engine()
    engine.add(request("for a peer"), is_for_peer=True)
    assert drain(engine) == {"for a peer": expected_tokens(request("for a peer"), LENGTH)}
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, 0)


@pytest.mark.parametrize(("load_s", "expected"), [(0.0, 1), (1000.0, 0)])
def test_pages_are_loaded_before_the_pass_when_that_would_wait_long(load_s: float, expected: int) -> None:
    engine, _, memory = warm_engine(num_pages=40)
    engine.add(request("beside", [30, 31] * 20, max_tokens=12))
    engine.step()
    engine.step()
    tiers: Any = engine._tiers
    for _ in range(20):
        tiers._host_tier.cost.measured(144, load_s)
    engine._rate.tokens_per_s = 1e-4  # to compute is slower than any load
    engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]
    tiers._search.compute_tokens_per_s = 1e-4
    if load_s:
        engine._rate.tokens_per_s = 0.1
    engine.add(request("again"))
    drain(engine)
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, expected)


def test_pages_are_loaded_before_the_pass_when_another_engine_has_evicted_some(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, memory = warm_engine()
    index: Any = engine._tiers._host  # type: ignore[union-attr]  # it has tiers
    acquire = index.acquire

    def acquire_seven(keys: list[bytes]) -> list[int | None]:
        kept = acquire(keys[:7])
        return [*kept, *[None] * (len(keys) - len(kept))]

    monkeypatch.setattr(index, "acquire", acquire_seven)
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(host=7 * 16)
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, 0)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("loads_by_layer", [False, True])
def test_rate_of_prefill_is_not_measured_when_the_pass_has_waited_for_a_load(loads_by_layer: bool) -> None:
    engine, _, memory = warm_engine()
    memory.loads_by_layer = loads_by_layer
    before = engine.load().prefill_tokens_per_s
    assert cached(run(engine, PROMPT[:96] + [7] * 90, "longer")) == CachedTokens(host=96)
    assert memory.num_layerwise_loads == loads_by_layer
    assert (engine.load().prefill_tokens_per_s == before) == loads_by_layer


@pytest.mark.parametrize("warm", [warm_engine, warm_windows])
def test_pages_are_loaded_before_the_pass_when_it_has_no_room_for_the_chunk(
    warm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, memory = warm()
    plan_chunk = engine.scheduler._plan_chunk
    calls = list[object]()

    def plan_none_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            plan_chunk(*args)

    monkeypatch.setattr(engine.scheduler, "_plan_chunk", plan_none_once)
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(host=144)
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, 1)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("groups", [{}, WINDOWED], ids=["one group", "windows"])
def test_every_text_is_right_when_loads_go_with_passes_and_come_changed(groups: dict[str, tuple[Any, ...]]) -> None:
    """Forty engines, most with few requests at a time, 200 events each; the sums show that the events reach what they
    try. A row that reads another group's page, or one before it is loaded, fails in the fake runner.
    """
    alone = {"loads_by_layer": (True,), "num_tier_pages": ((40, 0), (60, 8)), "spare_pages": (0, 2, 4)}
    if groups:
        alone |= {"num_tier_pages": ((80, 0), (120, 16))}
    loads = mismatches = hits = 0
    for seed in range(40):
        draw = random.Random(seed)
        world = make_world(draw, SETUPS | TIERED | groups | alone)
        assert isinstance(world, TieredWorld)
        tiers, memory = world.engine._tiers, world.runner.host_memory
        assert memory is not None
        for _ in range(200):
            few = len(world.live) < (1, 2, 3, 32)[seed % 4]
            draw.choices((world.add if few else world.step, world.abort, world.step), weights=(1, 0.1, 4))[0]()
            if draw.random() < 0.03:
                break_tier(world, draw.choice(("flip", "flip", "fail_copy")))
            if draw.random() < 0.01:
                world.break_next(draw.choice(("launch", "collect")))
            tiers._host_tier.is_on = True  # type: ignore[union-attr]  # what it does when it is off is another test's
            tiers._host.detach = lambda: None  # type: ignore[union-attr,method-assign]
            if not world.engine.has_work:
                world.engine.write_behind()
            world.check()
        world.drain()
        stats = world.engine.stats().kv_tiers.tiers["host"]
        loads += memory.num_layerwise_loads
        mismatches += stats.mismatches
        hits += stats.hit_tokens
    assert loads > 50
    assert mismatches > 15
    assert hits > 1_500
