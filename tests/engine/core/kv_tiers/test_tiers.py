"""Blocks that the device has evicted come back from lower tiers, and only where that is right and worth it."""

import random

import pytest

from mini_infer_contract.events import MEDIUM_DISK, MEDIUM_GPU, MEDIUM_HOST, BlockRemoved, BlockStored
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.page_record import page_key
from mini_infer_engine.core.kv_tiers.write_behind import stored_at_once, stores_all, window
from mini_infer_engine.core.prefix_cache import PrefixCache
from mini_infer_engine.core.request import CachedTokens, Output, Request, SamplingParams
from tests.support.engine_world import make_engine
from tests.support.fake_runner import FakeRunner, expected_tokens

LENGTH = 200
NUM_PAGES = 14
PROMPT = [1, 2, 3, 4] * 40


class _Eager(random.Random):
    """Ends every copy at the next look."""

    def random(self) -> float:
        return 0.0


def engine_with(num_tier_pages: tuple[int, int]) -> tuple[Engine, FakeRunner]:
    return make_engine(NUM_PAGES, 16, LENGTH, num_tier_pages=num_tier_pages, draw=_Eager(0))


def run(engine: Engine, prompt: list[int], name: str) -> list[Output]:
    """Serves a prompt alone, and writes behind all of it."""
    request = Request(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    )
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    while engine.write_behind():
        pass
    assert [token for output in outputs for token in output.token_ids] == expected_tokens(request, LENGTH)
    return outputs


def cached(outputs: list[Output]) -> CachedTokens:
    (found,) = [output.cached_tokens for output in outputs if output.cached_tokens is not None]
    return found


def others(engine: Engine, count: int) -> None:
    """Serves other prompts, which evict what the device has."""
    for number in range(count):
        run(engine, [5 + number] * 160, f"other {number}")


def test_prefix_comes_from_main_memory_when_the_device_has_evicted_it() -> None:
    engine, runner = engine_with((60, 0))
    run(engine, PROMPT, "first")
    others(engine, 2)
    outputs = run(engine, PROMPT, "again")
    assert cached(outputs) == CachedTokens(host=144)  # the last token of 160 is computed, and with it its page
    assert outputs[-1].num_cached_tokens == 144
    assert runner.host_memory is not None
    assert runner.host_memory.num_loads == 1
    assert engine.stats().kv_tiers.tiers["host"].hit_tokens == 144
    assert engine.stats().cached_prompt_tokens == 144
    assert engine.load().host_tokens_per_s > 0


def test_prefix_comes_from_the_disk_when_main_memory_has_evicted_it_too() -> None:
    engine, _ = engine_with((12, 200))
    run(engine, PROMPT, "first")
    others(engine, 4)
    found = cached(run(engine, PROMPT, "again"))
    assert found.disk > 0
    assert found == CachedTokens(host=144 - found.disk, disk=found.disk)
    assert engine.stats().kv_tiers.tiers["disk"].hit_tokens == found.disk


def test_first_pages_are_hit_on_the_device_when_only_the_last_were_evicted() -> None:
    engine, _ = engine_with((60, 0))
    run(engine, PROMPT, "first")
    run(engine, [9] * 100, "other")
    found = cached(run(engine, PROMPT, "again"))
    assert found.device > 0
    assert found.host > 0
    assert found.device + found.host == 144


def test_prefix_is_computed_when_copying_costs_more() -> None:
    engine, runner = engine_with((60, 0))
    assert runner.host_memory is not None
    run(engine, PROMPT, "first")
    others(engine, 2)
    for _ in range(20):
        engine._tiers._host_tier.cost.measured(144, 1000.0)  # type: ignore[union-attr]  # it has tiers
    assert cached(run(engine, PROMPT, "again")) == CachedTokens()
    assert engine.stats().kv_tiers.tiers["host"].declined_tokens == 144
    assert runner.host_memory.num_loads == 0


def serve(engine: Engine, prompt: list[int], name: str) -> None:
    """Serves a prompt alone. Nothing is written behind after its last step."""
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()


def test_nothing_is_stored_while_blank_pages_are_left_for_what_runs() -> None:
    engine, _ = make_engine(80, 16, LENGTH, num_tier_pages=(100, 0), draw=_Eager(0))
    for number in range(5):  # ten whole pages each
        serve(engine, [5 + number] * 160, f"{number}")
    assert engine.stats().kv_tiers.tiers["host"].blocks == 0
    while engine.write_behind():
        pass
    assert engine.stats().kv_tiers.tiers["host"].blocks == 50, "what an idle engine has is stored all the same"


@pytest.mark.parametrize("leases", [False, True])
def test_every_page_is_stored_before_it_is_evicted_under_load(leases: bool) -> None:
    engine, _ = make_engine(64, 16, LENGTH, num_tier_pages=(100, 0), draw=_Eager(0))
    cache, host = engine.scheduler.kv_cache.cache, engine._tiers._host  # type: ignore[union-attr]  # it has tiers
    assert isinstance(cache, PrefixCache)
    evict, lost = cache.evict, []

    def checked(page: int) -> None:
        blocks = cache.whole_page(page)
        if blocks is not None and page_key(blocks) not in host:
            lost.append(page)
        evict(page)

    cache.evict = checked  # type: ignore[method-assign]  # it checks what is evicted
    dice = random.Random(0)
    for number in range(60):
        if leases and number == 20:
            cache.pool.lease(cache.pool.least_recently_used(20), 1e9, is_pinned=False)
            engine._tiers.write_behind()  # others are evicted first from now on
        known = 16 * dice.randrange(3)
        serve(engine, [3] * known + [5 + number] * (160 - known), f"{number}")
    assert not lost


@pytest.mark.parametrize(
    ("num_tier_pages", "priorities", "expected"),
    [
        ((60, 0), {}, ["a", "c", "b", "d", "e"]),
        ((60, 0), {"c": 1, "d": 1, "e": 1}, ["a", "b", "c", "d", "e"]),
        ((0, 0), {}, ["a", "b", "c", "d", "e"]),
    ],
    ids=["with tiers", "of a lower priority", "without tiers"],
)
def test_one_later_sequence_overtakes_one_that_lacks_pages_when_there_are_tiers(
    num_tier_pages: tuple[int, int], priorities: dict[str, int], expected: list[str]
) -> None:
    engine, _ = make_engine(NUM_PAGES, 16, LENGTH, num_tier_pages=num_tier_pages, draw=_Eager(0))
    for number, (name, num_prompt) in enumerate({"a": 80, "b": 150, "c": 8, "d": 8, "e": 8}.items()):
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=[number + 1] * num_prompt,
            sampling=sampling,
            priority=priorities.get(name, 0),
        )
        engine.add(request)
    seen = dict[str, None]()
    while engine.has_work:
        seen.update((output.request_id, None) for output in engine.step() if output.token_ids)
    assert list(seen) == expected


def test_tokens_are_computed_when_a_page_comes_back_changed() -> None:
    engine, runner = engine_with((60, 0))
    assert runner.host_memory is not None
    run(engine, PROMPT, "first")
    others(engine, 2)
    index = engine._tiers._host  # type: ignore[union-attr]  # it has tiers
    sequence_keys = [record.key for record in index.records if record.blocks[0].packed_tokens[:4] == b"\1\0\0\0"]
    page = index.page(sequence_keys[4])
    assert page is not None
    runner.host_memory.pages[page][3] = 12345
    found = cached(run(engine, PROMPT, "again"))
    assert found.host < 144
    stats = engine.stats().kv_tiers.tiers["host"]
    assert stats.mismatches == 1
    assert stats.is_on


def test_tier_is_off_and_empty_when_three_pages_came_back_changed(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = engine_with((60, 0))
    assert runner.host_memory is not None
    run(engine, PROMPT, "first")
    for number in range(3):
        others(engine, 2)
        for cells in runner.host_memory.pages.values():
            cells[0] = 1
        assert cached(run(engine, PROMPT, f"again {number}")).host == 0
    engine.write_behind()
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.mismatches, stats.is_on, stats.blocks) == (3, False, 0)
    told = [record.getMessage() for record in caplog.records]
    assert [("host" in one, "page " in one) for one in told] == [(True, True)] * 3 + [(True, False)], (
        "each, and the end"
    )
    others(engine, 2)
    assert cached(run(engine, PROMPT, "last")) == CachedTokens()


def test_serving_goes_on_when_the_disk_fails() -> None:
    engine, runner = engine_with((12, 200))
    assert runner.disk_memory is not None
    others(engine, 4)
    assert runner.disk_memory.pages
    runner.disk_memory.error = "no space left"
    run(engine, PROMPT, "first")
    others(engine, 4)
    run(engine, PROMPT, "again")
    assert not runner.disk_memory.pages, "a full disk gets its room back"
    tiers = engine.stats().kv_tiers.tiers
    assert (tiers["disk"].is_on, tiers["disk"].errors) == (False, 1)
    assert tiers["host"].is_on


def test_events_name_the_medium_when_a_block_comes_to_a_tier_or_leaves_it() -> None:
    engine, _ = engine_with((12, 200))
    run(engine, PROMPT, "first")
    others(engine, 4)
    events = engine.take_events()
    stored = {event.medium for event in events if isinstance(event, BlockStored)}
    removed = {event.medium for event in events if isinstance(event, BlockRemoved)}
    assert stored == {MEDIUM_GPU, MEDIUM_HOST, MEDIUM_DISK}
    assert removed == {MEDIUM_GPU, MEDIUM_HOST}
    assert {chain.medium for chain in engine.snapshot()} == {MEDIUM_GPU, MEDIUM_HOST, MEDIUM_DISK}


def test_all_tiers_are_empty_when_the_prefix_cache_is_reset() -> None:
    engine, _ = engine_with((12, 200))
    run(engine, PROMPT, "first")
    others(engine, 4)
    assert engine.reset_prefix_cache()
    assert engine.snapshot() == []
    assert engine._tiers._host.store.num_blank == 12  # type: ignore[union-attr]  # it has tiers
    assert cached(run(engine, PROMPT, "again")) == CachedTokens()


@pytest.mark.parametrize(
    ("num_pages", "num_below", "num_blank_below", "is_idle", "expected"),
    [
        (100, 1000, 5, False, 25),  # a fourth
        (100, 20, 0, False, 10),  # half of what is below
        (100, 1, 1, False, 1),
        (2, 1000, 0, False, 1),
        (100, 1000, 0, True, 0),  # nothing is evicted below while nothing runs
    ],
)
def test_window_of_pages_written_behind(
    num_pages: int, num_below: int, num_blank_below: int, is_idle: bool, expected: int
) -> None:
    assert window(num_pages, num_below, num_blank_below, is_idle=is_idle) == expected


@pytest.mark.parametrize(
    ("page_mib", "bytes_per_s", "expected"),
    [
        (7, 40e9, 108),  # what passes over 20 ms of PCIe 5
        (7, 2e9, 9),  # a core: 64 MiB
        (7, 1e15, 146),  # 1 GiB
        (100, 2e9, 1),
    ],
)
def test_pages_that_are_stored_in_a_step(page_mib: int, bytes_per_s: float, expected: int) -> None:
    assert stored_at_once(page_mib << 20, bytes_per_s) == expected


@pytest.mark.parametrize(("num_below", "expected"), [(199, False), (200, True)])
def test_main_memory_gets_every_page_if_it_is_twice_the_device(num_below: int, expected: bool) -> None:
    assert stores_all(100, num_below) == expected


@pytest.mark.parametrize(("num_host_pages", "expected"), [(2 * NUM_PAGES, 160), (2 * NUM_PAGES - 1, 0)])
def test_pages_of_a_running_sequence_are_in_main_memory_if_that_is_large(num_host_pages: int, expected: int) -> None:
    engine, _ = engine_with((num_host_pages, 0))
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add(Request(request_id="runs", prompt_token_ids=PROMPT[:150], sampling=sampling))
    for _ in range(14):
        engine.step()
    assert engine.stats().running == 1
    assert engine.stats().kv_tiers.tiers["host"].blocks * 16 == expected
