"""Pages of several KV groups are loaded while a pass computes: of windows those that its first token sees."""

import random

import pytest

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.page_record import group_key
from mini_infer_engine.core.prefix_cache import PrefixCache
from mini_infer_engine.core.request import CachedTokens, Output
from mini_infer_engine.core.step import Step
from tests.engine.core.kv_tiers.test_layerwise_loads import (
    WINDOW,
    check_nothing_is_left,
    drain,
    request,
    stored_on_device,
    warm_windows,
)
from tests.engine.core.kv_tiers.test_tiers import LENGTH, PROMPT, cached, run
from tests.support.fake_runner import expected_tokens
from tests.support.fake_tiers import FakeHostMemory


class _Late(random.Random):
    """Ends no copy before it is told to."""

    ends = False

    def random(self) -> float:
        return 0.0 if self.ends else 0.9


def group_keys(group: int) -> list[bytes]:
    return [group_key(key, group) for key in block_keys(PROMPT, root_key("revision"))]


def num_on_device(engine: Engine) -> list[int]:
    """The pages of the prompt that can be hit, in each of two groups."""
    cache = engine.scheduler.kv_cache.cache
    assert isinstance(cache, PrefixCache)
    return [len(cache.pages_of(group_keys(group))) for group in (0, 1)]


def change(engine: Engine, memory: FakeHostMemory, group: int, place: int) -> None:
    """Changes a page of the prompt in main memory."""
    page = engine._tiers._host.page(group_keys(group)[place])  # type: ignore[union-attr]  # it has tiers
    assert page is not None
    memory.pages[page][3] = 12345
    memory.flipped.add(page)


def lose_window(engine: Engine) -> None:
    """Has the device lose the window's pages of the prompt, after it has been served."""
    cache = engine.scheduler.kv_cache.cache
    assert isinstance(cache, PrefixCache)
    cache.forget(cache.pages_of(group_keys(1)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("windows", "num_pages", "num_tokens"),
    [((None, WINDOW), 9 + 2, 144), ((WINDOW,), 2, 32), ((None, WINDOW, 40, 100), 9 + 2 + 3 + 7, 144)],
)
def test_first_pass_follows_the_load_of_all_groups(
    windows: tuple[int | None, ...], num_pages: int, num_tokens: int, depth: int
) -> None:
    engine, runner, memory = warm_windows(windows, step_depth=depth)
    num_batches, outputs = len(runner.batches), list[Output]()
    engine.add(request("again"))
    while engine.has_work:
        outputs += engine.step()
    made = [token for output in outputs for token in output.token_ids]
    assert made == expected_tokens(request("again"), LENGTH, window=windows[0])
    assert cached(outputs) == CachedTokens(device=144 - num_tokens, host=num_tokens)
    assert outputs[-1].num_cached_tokens == 144
    assert (memory.num_loads, memory.num_layerwise_loads) == (1, 1)
    first = runner.batches[num_batches]
    assert [row.start for row in first.rows] == [144]
    (load,) = first.layerwise_loads
    assert len(load.moves) == num_pages  # type: ignore[attr-defined]  # it is the fake one
    assert engine.stats().kv_tiers.tiers["host"].loaded_bytes == num_pages * memory.page_bytes
    check_nothing_is_left(engine)


def test_no_group_is_hit_before_the_commit() -> None:
    engine, _, _ = warm_windows(step_depth=1)
    engine.add(request("first again"))
    engine.step()
    engine.add(request("too"))
    assert (num_on_device(engine), stored_on_device(engine)) == ([0, 0], 0)
    (first,) = engine.step()
    assert (num_on_device(engine)[0], stored_on_device(engine)) == (10, 10)
    made = drain(engine)
    made["first again"][:0] = first.token_ids
    assert made == {name: expected_tokens(request(name), LENGTH) for name in ("first again", "too")}
    check_nothing_is_left(engine)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("group", "place"), [(0, 0), (0, 8), (1, 7), (1, 8)])
def test_text_is_right_and_no_group_is_cached_when_a_page_came_changed(depth: int, group: int, place: int) -> None:
    engine, _, memory = warm_windows(step_depth=depth)
    change(engine, memory, group, place)
    engine.add(request("again"))
    seen = list[Output]()
    while engine.has_work:
        seen += engine.step()
        if not seen and not engine._in_flight:
            assert num_on_device(engine) == [0, 0], "void blocks can be hit"
    assert [token for output in seen for token in output.token_ids] == expected_tokens(request("again"), LENGTH)
    assert cached(seen) == CachedTokens()
    stats = engine.stats()
    assert (stats.kv_tiers.tiers["host"].mismatches, stats.kv_tiers.tiers["host"].hit_tokens) == (1, 0)
    assert (stats.cached_prompt_tokens, stats.preemptions, memory.num_layerwise_loads) == (0, 1, 1)
    check_nothing_is_left(engine)
    engine.scheduler.kv_cache.reset_prefix_cache()
    assert cached(run(engine, PROMPT, "stored anew")) == CachedTokens(host=144)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_window_alone_is_loaded_when_the_device_has_lost_no_other_page(is_changed: bool) -> None:
    engine, _, memory = warm_windows()
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(host=144)
    lose_window(engine)
    if is_changed:
        change(engine, memory, 1, 8)
    before = engine.stats().cached_prompt_tokens
    outputs = run(engine, PROMPT, "once more")
    assert memory.num_layerwise_loads == 2
    # Without its window the prompt cannot go on from the pages of the other group.
    num_cached = 0 if is_changed else 144
    assert cached(outputs) == CachedTokens(device=num_cached)
    assert outputs[-1].num_cached_tokens == engine.stats().cached_prompt_tokens - before == num_cached
    check_nothing_is_left(engine)


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_changed", [False, True])
def test_nothing_is_left_when_the_request_is_aborted(num_steps: int, depth: int, is_changed: bool) -> None:
    engine, _, memory = warm_windows(step_depth=depth, long_prefill_token_threshold=5)
    if is_changed:
        change(engine, memory, 1, 8)
    engine.add(request("again"))
    for _ in range(num_steps):
        engine.step()
    engine.abort("again")
    assert drain(engine) == {}
    check_nothing_is_left(engine)
    assert run(engine, PROMPT, "once more")[-1].finish_reason == "length"


def test_pages_behind_a_window_stay_pinned_while_they_are_copied() -> None:
    """The second chunk of the prompt frees one, in a plan before the copy has ended."""
    engine, runner, memory = warm_windows(step_depth=1, long_prefill_token_threshold=16)
    num_batches, prompt = len(runner.batches), [*PROMPT[:144], *range(1, 40)]
    memory.draw = late = _Late(0)
    engine.add(request("again", prompt))
    engine.step()
    (load,) = runner.batches[num_batches].layerwise_loads
    targets = [move.target for move in load.moves]  # type: ignore[attr-defined]  # it is the fake one
    plan = engine.scheduler.plan

    def plan_and_look(now_s: float = 0.0) -> Step:
        step = plan(now_s)
        (sequence,) = engine.scheduler.running
        left = [page for page in targets if all(page not in table for table in sequence.page_tables)]
        assert len(left) == 1
        assert [engine.scheduler.kv_cache.pool.references[page] for page in left] == [1]
        late.ends = True
        return step

    engine.scheduler.plan = plan_and_look  # type: ignore[method-assign]  # it looks between plans
    engine.step()
    assert late.ends
    engine.scheduler.plan = plan  # type: ignore[method-assign]  # its own again
    assert drain(engine)["again"] == expected_tokens(request("again", prompt), LENGTH)
    check_nothing_is_left(engine)
