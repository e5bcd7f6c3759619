"""Pages of several KV groups come back from lower tiers: of groups with a window, those that the next token sees."""

import pytest

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_engine.config.model.kv_groups import kv_cache_config
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.page_record import group_key
from mini_infer_engine.core.kv_tiers.tiers import KVTiers
from mini_infer_engine.core.request import CachedTokens, Request, SamplingParams
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
    engine.add(Request(request_id="runs", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=30)))
    for _ in range(8):
        engine.step()
    assert engine.stats().running == 1
    assert [len(pages_of(engine, group)) for group in (0, 1)] == [10, 10]


def test_gateways_hear_of_the_first_group_alone() -> None:
    engine, _ = engine_with((80, 0))
    run(engine, PROMPT, "first")
    events = [event for event in engine.take_events() if event.medium == "CPU"]
    assert sum(len(event.block_hashes) for event in events) == 10
