"""Checkpoints of recurrent state come back from lower tiers with their pages, whole or not at all."""

from dataclasses import replace

import pytest

from mini_infer_contract.blocks import root_key
from mini_infer_engine.config.model.kv_groups import KVGroup, kv_cache_config
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.tiers import KVTiers
from mini_infer_engine.core.request import CachedTokens, Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence
from tests.engine.core.kv_tiers.test_tiers import LENGTH, NUM_PAGES, PROMPT, _Eager, cached, others, run
from tests.support.engine_world import make_engine
from tests.support.fake_runner import FakeRunner


def engine_with(
    num_tier_pages: tuple[int, int], num_checkpoints: int = 3, num_pages: int = NUM_PAGES
) -> tuple[Engine, FakeRunner]:
    """A state takes two pages of main memory."""
    groups = replace(
        kv_cache_config([None], LENGTH),
        state_group=KVGroup("recurrent_state", (1, 2)),
        num_checkpoints=num_checkpoints,
    )
    return make_engine(num_pages, 16, LENGTH, num_tier_pages=num_tier_pages, draw=_Eager(0), kv_cache=groups)


def tiers_of(engine: Engine) -> KVTiers:
    assert isinstance(engine._tiers, KVTiers)
    return engine._tiers


def states_in_memory(engine: Engine) -> list[int]:
    """The pages of main memory with parts of states."""
    host = tiers_of(engine)._host
    return [page for page in range(host.num_pages) if (record := host.record(page)) is not None and record.part_key]


def test_prefix_comes_with_its_state_from_main_memory_when_the_device_has_evicted_both() -> None:
    engine, runner = engine_with((80, 0))
    run(engine, PROMPT, "first")
    others(engine, 4)
    outputs = run(engine, PROMPT, "again")
    assert cached(outputs) == CachedTokens(host=144)
    assert outputs[-1].num_cached_tokens == 144
    assert runner.host_memory is not None
    assert runner.host_memory.num_state_loads == 1
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.hit_tokens, stats.mismatches) == (144, 0)
    assert stats.used_bytes == (stats.blocks + len(states_in_memory(engine))) * runner.host_memory.page_bytes


def test_prefix_comes_from_the_disk_when_main_memory_has_evicted_it_too() -> None:
    engine, _ = engine_with((16, 300))
    run(engine, PROMPT, "first")
    others(engine, 6)
    found = cached(run(engine, PROMPT, "again"))
    assert found.disk > 0
    assert found.host + found.disk + found.device == 144


def test_state_alone_is_loaded_when_its_checkpoint_was_evicted() -> None:
    engine, runner = engine_with((80, 0), num_checkpoints=1)
    run(engine, PROMPT, "first")
    run(engine, [9] * 40, "other")  # it takes the only checkpoint, and few pages
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(device=144)
    assert runner.host_memory is not None
    assert runner.host_memory.num_state_loads == 1


def test_prompt_is_computed_when_a_part_of_its_state_is_missing() -> None:
    engine, runner = engine_with((80, 0))
    run(engine, PROMPT, "first")
    others(engine, 4)
    host = tiers_of(engine)._host
    for page in states_in_memory(engine)[1::2]:
        host.evict(page)
    assert cached(run(engine, PROMPT, "again")) == CachedTokens()
    assert runner.host_memory is not None
    assert runner.host_memory.num_loads == 0


def test_nothing_of_a_prefix_is_used_when_its_state_comes_back_changed() -> None:
    engine, runner = engine_with((80, 0))
    assert runner.host_memory is not None
    run(engine, PROMPT, "first")
    others(engine, 4)
    for page in states_in_memory(engine)[1::2]:
        runner.host_memory.pages[page][0] = 12345
    assert cached(run(engine, PROMPT, "again")) == CachedTokens()
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.mismatches, stats.hit_tokens, stats.is_on) == (1, 0, True)
    for number in range(4):
        run(engine, [20 + number] * 160, f"another {number}")
    assert cached(run(engine, PROMPT, "stored anew")) == CachedTokens(host=144)


def test_nothing_of_a_prefix_is_used_when_one_of_its_pages_comes_back_changed() -> None:
    engine, runner = engine_with((80, 0))
    assert runner.host_memory is not None
    run(engine, PROMPT, "first")
    others(engine, 4)
    host = tiers_of(engine)._host
    own = [
        page for page in range(80) if (one := host.record(page)) and one.blocks and one.blocks[0].packed_tokens[0] == 1
    ]
    runner.host_memory.pages[own[3]][2] = 12345
    assert cached(run(engine, PROMPT, "again")) == CachedTokens()
    assert engine.stats().kv_tiers.tiers["host"].mismatches == 1


def test_prompt_is_computed_when_no_checkpoint_is_free_for_its_state() -> None:
    engine, runner = engine_with((80, 0), num_checkpoints=1)
    run(engine, PROMPT, "first")
    run(engine, [9] * 40, "other")
    checkpoints = engine.scheduler.kv_cache.state_checkpoints
    assert checkpoints is not None
    assert checkpoints.reserve() is not None
    assert cached(run(engine, PROMPT, "again")) == CachedTokens()
    assert runner.host_memory is not None
    assert runner.host_memory.num_state_loads == 0


def test_prompt_is_computed_when_its_load_is_void_from_the_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is under way then whose end the engine could wait for."""
    engine, _ = engine_with((80, 0))
    run(engine, PROMPT, "first")
    others(engine, 4)
    monkeypatch.setattr(tiers_of(engine)._loads, "_take_checkpoint", lambda state: None)
    request = Request(request_id="again", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))
    engine.add(request)
    engine.step()
    assert not engine.only_receives
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert cached(outputs) == CachedTokens()
    assert engine.stats().cached_prompt_tokens == 0


def test_prefix_is_brought_with_its_state_before_another_engine_reads_it() -> None:
    engine, runner = engine_with((80, 0), num_pages=60)
    run(engine, PROMPT, "first")
    engine.scheduler.kv_cache.reset_prefix_cache()
    tiers, prompt = tiers_of(engine), sequence_of(PROMPT)
    assert tiers.bring(prompt, keep_s=60.0)
    assert tiers.is_bringing(prompt)
    while engine.write_behind():
        pass
    assert not tiers.is_bringing(prompt)
    pages, num_tokens = engine.scheduler.kv_cache.longest_cached(PROMPT, prompt.root)
    assert (len(pages), num_tokens) == (9, 144)
    assert runner.host_memory is not None
    assert runner.host_memory.num_state_loads == 1
    assert cached(run(engine, PROMPT, "again")) == CachedTokens(host=144)
    assert runner.host_memory.num_loads == 1, "what was prefetched is hit on the device"


def sequence_of(prompt: list[int]) -> Sequence:
    """A prompt that will never run."""
    request = Request(request_id="peer", prompt_token_ids=prompt, sampling=SamplingParams())
    return Sequence(request, (), 0.0, root_key("revision"), 0, frozenset(), ())


def test_states_are_no_blocks_to_gateways() -> None:
    engine, _ = engine_with((80, 0))
    run(engine, PROMPT, "first")
    assert states_in_memory(engine)
    keys = {key for chain in engine.snapshot() for key in chain.block_hashes}
    events = [event for event in engine.take_events() if event.medium == "CPU"]
    assert sum(len(event.block_hashes) for event in events) == 10
    assert len(keys) == 10
