"""Pages of several KV groups come back from lower tiers: of groups with a window, those that the next token sees."""

import pytest

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_engine.config.model.kv_groups import kv_cache_config
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.page_record import group_key
from mini_infer_engine.core.kv_tiers.tiers import KVTiers
from mini_infer_engine.core.prefix_cache import PrefixCache
from mini_infer_engine.core.request import CachedTokens, Request, SamplingParams
from tests.engine.core.kv_tiers.test_prefetches import run as run_request
from tests.engine.core.kv_tiers.test_prefetches import settle
from tests.engine.core.kv_tiers.test_tiers import LENGTH, PROMPT, _Eager, cached, run
from tests.support.engine_world import make_engine
from tests.support.fake_runner import FakeRunner

WINDOW = 20
"""Tokens: the last two pages of a prefix."""


def engine_with(num_tier_pages: tuple[int, int]) -> tuple[Engine, FakeRunner]:
    """A group that retains all tokens, and one with a window."""
    return make_engine(
        60, 16, LENGTH, num_tier_pages=num_tier_pages, draw=_Eager(0), kv_cache=kv_cache_config([None, WINDOW], LENGTH)
    )


def tiers_of(engine: Engine) -> KVTiers:
    assert isinstance(engine._tiers, KVTiers)
    return engine._tiers


def lose_device(engine: Engine) -> None:
    engine.scheduler.kv_cache.reset_prefix_cache()


def pages_of(engine: Engine, group: int) -> list[int]:
    """The pages of main memory with the prompt's pages of a group."""
    host = tiers_of(engine)._host
    keys = [group_key(key, group) for key in block_keys(PROMPT, root_key("revision"))]
    return [page for key in keys if (page := host.page(key)) is not None]


def test_prefix_comes_back_with_the_pages_that_a_window_sees() -> None:
    engine, runner = engine_with((80, 0))
    run(engine, PROMPT, "first")
    lose_device(engine)
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(host=144)
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.hit_tokens, stats.mismatches) == (144, 0)
    assert runner.host_memory is not None
    assert stats.loaded_bytes == (9 + 2) * runner.host_memory.page_bytes


def test_prefix_comes_from_the_disk_when_main_memory_has_lost_it() -> None:
    engine, _ = engine_with((80, 200))
    run(engine, PROMPT, "first")
    lose_device(engine)
    tiers_of(engine)._host.clear()
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(disk=144)


@pytest.mark.parametrize("group", [0, 1])
def test_nothing_is_used_when_a_page_of_any_group_comes_back_changed(group: int) -> None:
    engine, runner = engine_with((80, 0))
    assert runner.host_memory is not None
    run(engine, PROMPT, "first")
    lose_device(engine)
    runner.host_memory.pages[pages_of(engine, group)[7]][3] = 12345  # the window sees this and the page after it
    assert cached(run(engine, PROMPT, "again")) == CachedTokens()
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.mismatches, stats.hit_tokens, stats.is_on) == (1, 0, True)
    lose_device(engine)
    assert cached(run(engine, PROMPT, "stored anew")) == CachedTokens(host=144)


def test_a_shorter_prefix_comes_back_when_the_last_page_of_a_window_is_missing() -> None:
    engine, _ = engine_with((80, 0))
    run(engine, PROMPT, "first")
    lose_device(engine)
    tiers_of(engine)._host.evict(pages_of(engine, 1)[8])
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(host=128)


def test_pages_of_all_groups_are_in_main_memory_while_their_sequence_runs_if_that_is_large() -> None:
    engine, _ = engine_with((120, 0))  # twice the device
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add(Request(request_id="runs", prompt_token_ids=PROMPT, sampling=sampling))
    for _ in range(8):
        engine.step()
    assert engine.stats().running == 1
    assert [len(pages_of(engine, group)) for group in (0, 1)] == [10, 10]


def test_gateways_hear_of_the_first_group_alone() -> None:
    engine, _ = engine_with((80, 0))
    run(engine, PROMPT, "first")
    events = [event for event in engine.take_events() if event.medium == "CPU"]
    assert sum(len(event.block_hashes) for event in events) == 10


def announced_engine() -> tuple[Engine, FakeRunner]:
    """The prompt's session is expected, and its pages are in main memory alone."""
    engine, runner = engine_with((80, 0))
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    run_request(engine, Request(request_id="first#0", prompt_token_ids=PROMPT, sampling=sampling, lease_s=600.0))
    lose_device(engine)
    return engine, runner


def num_on_device(engine: Engine) -> list[int]:
    """The pages of the prompt that are cached, in each group."""
    cache = engine.scheduler.kv_cache.cache
    assert isinstance(cache, PrefixCache)
    keys = block_keys(PROMPT, root_key("revision"))
    return [len(cache.pages_of([group_key(key, group) for key in keys])) for group in (0, 1)]


def test_session_is_on_the_device_in_all_groups_when_its_request_was_announced() -> None:
    engine, _ = announced_engine()
    engine.prefetch(["first"], 60.0)
    settle(engine)
    assert num_on_device(engine) == [10, 2]
    stats = engine.stats().kv_tiers.tiers["host"]
    assert stats.prefetched_tokens == 160, "pages of windows are no tokens more"
    run(engine, [*PROMPT, 7, 7], "again")
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.prefetch_used_tokens, stats.hit_tokens, stats.mismatches) == (160, 160, 0)
    assert engine.scheduler.kv_cache.pool.references == [0] * 60


def test_waiting_request_is_read_ahead_in_all_groups_when_all_slots_are_taken() -> None:
    engine, _ = make_engine(
        60, 16, LENGTH, num_tier_pages=(80, 0), draw=_Eager(0), max_num_seqs=1,
        kv_cache=kv_cache_config([None, WINDOW], LENGTH),
    )  # fmt: skip
    run(engine, PROMPT, "first")
    lose_device(engine)
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add(Request(request_id="long", prompt_token_ids=[40] * 20, sampling=sampling))
    engine.step()
    engine.add(Request(request_id="again", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))
    for _ in range(20):
        engine.step()
    assert [one.request.request_id for one in engine.scheduler.waiting] == ["again"]
    assert num_on_device(engine) == [9, 2]
    while engine.has_work:
        engine.step()
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.prefetched_tokens, stats.prefetch_used_tokens, stats.hit_tokens) == (144, 144, 144)
    settle(engine)
    assert engine.scheduler.kv_cache.pool.references == [0] * 60


@pytest.mark.parametrize("group", [0, 1])
def test_nothing_is_published_when_a_page_of_any_group_is_prefetched_changed(group: int) -> None:
    engine, runner = announced_engine()
    assert runner.host_memory is not None
    runner.host_memory.pages[pages_of(engine, group)[8]][3] = 12345
    engine.prefetch(["first"], 60.0)
    settle(engine)
    assert num_on_device(engine) == [0, 0]
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.prefetched_tokens, stats.prefetch_wasted_tokens, stats.mismatches) == (160, 160, 1)
    assert engine.scheduler.kv_cache.pool.references == [0] * 60
    assert cached(run(engine, PROMPT, "again")) in (CachedTokens(), CachedTokens(host=128))


def test_a_window_is_prefetched_alone_when_the_device_has_lost_no_other_page() -> None:
    engine, runner = announced_engine()
    engine.prefetch(["first"], 60.0)
    settle(engine)
    cache = engine.scheduler.kv_cache.cache
    assert isinstance(cache, PrefixCache)
    keys = [group_key(key, 1) for key in block_keys(PROMPT, root_key("revision"))]
    cache.forget(cache.pages_of(keys))
    assert num_on_device(engine) == [10, 0]
    tiers_of(engine)._prefetches.clear()
    assert runner.host_memory is not None
    runner.host_memory.pages[pages_of(engine, 1)[9]][3] = 12345  # so that nothing of the group may be published
    engine.prefetch(["first"], 60.0)
    settle(engine)
    assert num_on_device(engine) == [10, 0]
    assert engine.scheduler.kv_cache.pool.references == [0] * 60
