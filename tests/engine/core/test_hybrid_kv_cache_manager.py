"""What sequences with several KV groups take and give back, as tables: `.` is a page that was freed, `x` one in use."""

from collections.abc import Iterator
from itertools import count

import pytest

from mini_infer_contract.blocks import root_key
from mini_infer_engine.config.model.kv_groups import kv_cache_config, uniform_kv_cache
from mini_infer_engine.core.hybrid_kv_cache_manager import HybridKVCacheManager
from mini_infer_engine.core.page_allocator import PoolTooSmallError
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.sequence import Sequence, SequenceGroup, State
from mini_infer_engine.core.step import Step

ARRIVALS: Iterator[int] = count()


def make_scheduler(windows: list[int | None], num_pages: int, chunk: int = 32, **options: bool) -> Scheduler:
    kv_cache = kv_cache_config(windows, 10_000)
    manager = HybridKVCacheManager(num_pages, 16, kv_cache, chunk_tokens=chunk, **options)
    return Scheduler(manager, max_num_seqs=8, token_budget=chunk, chunk_limit=chunk)


def add(scheduler: Scheduler, num_prompt: int, token: int = 1) -> Sequence:
    sequence = Sequence(
        Request(request_id="r", prompt_token_ids=[token] * num_prompt, sampling=SamplingParams()),
        order=(0, next(ARRIVALS)),
        arrival_s=0,
        root=root_key("revision"),
        last_position=1_000,
        stops=frozenset(),
        suppressed=(),
    )
    scheduler.add(sequence)
    return sequence


def run(scheduler: Scheduler) -> Step:
    """A pass that is committed at once; every sampled token is 7."""
    step = scheduler.plan()
    scheduler.launched(step)
    scheduler.ended(step)
    for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
        sequence.in_flight -= 1
        if sequence.is_leaving:
            scheduler.release(sequence)
        elif row.sampling is not None:
            scheduler.append(sequence, 7)
    return step


def drawn(scheduler: Scheduler, sequence: Sequence) -> list[str]:
    null = scheduler.kv_cache.num_pages
    return ["".join("." if page == null else "x" for page in table) for table in sequence.page_tables]


def test_pages_are_freed_behind_the_window_when_chunks_and_decodes_pass_them() -> None:
    scheduler = make_scheduler([None, 20], num_pages=40, enable_caching=False)
    sequence = add(scheduler, 100)
    reported = []
    for _ in range(4):
        run(scheduler)
        reported.append(drawn(scheduler, sequence))
    assert reported == [
        ["xxxxxxx", "xx"],  # tokens 0 to 31
        ["xxxxxxx", "xxxx"],  # 32 to 63: the first of them sees tokens 13 to 32
        ["xxxxxxx", "..xxxx"],  # 64 to 95: sees 45 and later
        ["xxxxxxx", "....xxx"],  # 96 to 99, and the next
    ]
    for _ in range(12):
        run(scheduler)
    assert drawn(scheduler, sequence) == ["xxxxxxx", "....xxx"], "pages are freed where a page is added"
    run(scheduler)
    assert drawn(scheduler, sequence) == ["xxxxxxxx", ".....xxx"]
    pool = scheduler.kv_cache.pool
    assert pool.num_pages - pool.num_free == 11
    assert scheduler.plan().batch.rows[0].more_page_tables == [sequence.more_page_tables[0]]


def test_sequences_of_any_length_run_when_all_layers_have_a_window() -> None:
    scheduler = make_scheduler([20], num_pages=6, enable_caching=False)
    scheduler.kv_cache.check_fits(1_000_000)
    sequence = add(scheduler, 600)
    for _ in range(60):
        run(scheduler)
    assert len(sequence.token_ids) > 600
    assert drawn(scheduler, sequence)[0].count("x") <= 3


@pytest.mark.parametrize(
    ("windows", "num_pages", "longest"), [([None, 20], 30, 400), ([None, 20, 20], 30, 320), ([None, 20], 6, 48)]
)
def test_start_fails_when_the_pool_is_too_small_for_one_sequence(
    windows: list[int | None], num_pages: int, longest: int
) -> None:
    manager = make_scheduler(windows, num_pages).kv_cache
    manager.check_fits(longest)
    with pytest.raises(PoolTooSmallError, match=f"at most {longest}"):
        manager.check_fits(longest + 1)


def test_more_sequences_run_at_once_when_windows_are_freed() -> None:
    """Both pools have 60 layers' pages: of two layers each, one of which has a window of 20 tokens."""
    running = []
    for windows, num_pages in (([None, 20], 60), ([None, None], 30)):
        kv_cache = kv_cache_config(windows, 10_000) if None in windows and 20 in windows else uniform_kv_cache(2)
        manager = HybridKVCacheManager(num_pages, 16, kv_cache, chunk_tokens=16, enable_caching=False)
        scheduler = Scheduler(manager, max_num_seqs=8, token_budget=64, chunk_limit=16)
        for token in range(8):
            add(scheduler, 140, token)
        running.append(0)
        for _ in range(25):
            run(scheduler)
            running[-1] = max(running[-1], len(scheduler.running))
        assert scheduler.num_preemptions == 0
    assert running == [4, 3]


def test_preempted_sequence_hits_what_its_windows_retained_when_it_goes_on() -> None:
    scheduler = make_scheduler([None, 20], num_pages=25)
    first, second = add(scheduler, 100, 1), add(scheduler, 60, 2)
    while not scheduler.num_preemptions:
        run(scheduler)
        assert len(first.token_ids) < 300
    assert scheduler.waiting == [second]
    assert not any(second.page_tables)
    scheduler.leave(first, State.FINISHED)
    row = run(scheduler).batch.rows[0]
    assert row.start > 60, "most of what it had is computed no more"
    assert row.more_page_tables[0][0] == scheduler.kv_cache.num_pages


def test_beams_are_refused_when_their_pages_of_all_groups_are_more_than_the_pool() -> None:
    """The prompt has four pages, and each beam three of its own, in both groups."""
    make_scheduler([None, 20], 26).kv_cache.check_beams_fit(3, 64, 100)
    with pytest.raises(ValueError, match="max_tokens"):
        make_scheduler([None, 20], 25).kv_cache.check_beams_fit(3, 64, 100)


def test_only_single_sequences_hit_when_pages_behind_windows_are_freed() -> None:
    scheduler = make_scheduler([33, 17], num_pages=40, enable_caching=True)
    first = add(scheduler, 100)
    for _ in range(5):
        run(scheduler)
    again = add(scheduler, 100)
    assert scheduler.kv_cache.get_computed_blocks(again).num_tokens == 96
    again.group = SequenceGroup(2, [again])
    assert scheduler.kv_cache.get_computed_blocks(again).num_tokens == 0
    assert scheduler.kv_cache.num_expected_cached(again) == 0
    assert first.num_computed >= 100
