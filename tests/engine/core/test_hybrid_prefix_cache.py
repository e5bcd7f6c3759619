"""Prefix hits over several KV groups: whole prefixes where all tokens are retained, their last blocks in windows."""

import pytest

from mini_infer_contract.blocks import root_key
from mini_infer_contract.events import BlockRemoved, BlockStored, wire_hash
from mini_infer_engine.config.model.kv_groups import kv_cache_config
from mini_infer_engine.core.hybrid_prefix_cache import HybridPrefixCache
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence

TEXT = [n * 7 % 1000 for n in range(200)]


def make_cache(windows: list[int | None], page_size: int = 16, num_pages: int = 64) -> HybridPrefixCache:
    return HybridPrefixCache(num_pages, page_size, kv_cache_config(windows, 10_000).groups)


def make_sequence(token_ids: list[int], adapter: str = "") -> Sequence:
    return Sequence(
        Request(request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams()),
        order=(0, 0),
        arrival_s=0,
        root=root_key("revision", adapter=adapter),
        last_position=2_000,
        stops=frozenset(),
        suppressed=(),
    )


def compute(cache: HybridPrefixCache, token_ids: list[int], num_groups: int) -> Sequence:
    """A sequence that has all its tokens, in pages of its own in each group."""
    sequence = make_sequence(token_ids)
    tables = [[cache.pool.allocate() for _ in range(cache.pool.pages_for(len(token_ids)))] for _ in range(num_groups)]
    sequence.pages, *sequence.more_page_tables = tables
    sequence.num_computed = len(token_ids)
    cache.publish(sequence)
    return sequence


@pytest.mark.parametrize(
    ("windows", "page_size", "forgotten", "num_tokens"),
    [
        ([None, 40], 16, {}, 160),
        ([None, 40], 16, {0: [9]}, 144),
        ([None, 40], 16, {0: [4]}, 64),
        ([None, 40], 16, {1: [0, 1, 2, 3, 4, 5, 6]}, 160),  # three blocks before the next token are left
        ([None, 40], 16, {1: [7]}, 112),
        ([None, 40], 16, {1: [7, 2]}, 112),
        ([None, 40], 16, {1: [7, 5]}, 80),
        ([None, 40], 16, {1: [0, 1, 2, 3, 4, 5, 6, 8]}, 0),
        ([None, 40], 16, {0: [5], 1: [3, 8]}, 48),  # the window's last blocks, and no token from the fifth page on
        ([None, 40, 20], 16, {1: [8], 2: [7]}, 112),
        ([40], 16, {0: [0, 1, 2]}, 160),
        ([40], 16, {0: [9]}, 144),
        ([40], 16, {0: [9, 3]}, 144),
        ([1], 16, {0: [0, 1, 2, 3, 4, 5, 6, 7, 8]}, 160),
        ([None, 40], 64, {}, 160),
        ([None, 40], 64, {1: [0]}, 160),
        ([None, 40], 64, {1: [1]}, 64),
        ([None, 40], 64, {0: [2]}, 128),
    ],
)
def test_hit_has_whole_prefixes_and_the_last_blocks_of_windows_when_pages_are_evicted(
    windows: list[int | None], page_size: int, forgotten: dict[int, list[int]], num_tokens: int
) -> None:
    cache = make_cache(windows, page_size)
    owner = compute(cache, TEXT[:165], len(windows))
    for group, places in forgotten.items():
        for place in places:
            cache.evict(owner.page_tables[group][place])
    hit = cache.match(make_sequence([*TEXT[:165], 9_999]))
    assert hit.num_tokens == num_tokens
    assert cache.match_length(make_sequence([*TEXT[:165], 9_999])) == num_tokens // 16
    for window, one, table in zip(windows, (hit, *hit.others), owner.page_tables, strict=True):
        num_pages = num_tokens // page_size
        skipped = 0 if window is None else max(0, num_tokens - window + 1) // page_size
        assert one.pages == [64] * skipped + table[skipped:num_pages]
        assert one.tail_page == (table[num_pages] if num_tokens % page_size else None)


def test_hit_ends_with_a_page_when_tails_are_not_copied() -> None:
    cache = make_cache([None, 40], 64)
    owner = compute(cache, TEXT[:165], 2)
    hit = cache.match_whole_pages(make_sequence(TEXT[:165]))
    assert (hit.num_tokens, hit.pages, hit.tail_page) == (128, owner.pages[:2], None)
    cache.evict(owner.more_page_tables[0][1])
    assert cache.match_whole_pages(make_sequence(TEXT[:165])).num_tokens == 64


def test_blocks_are_not_hit_when_the_adapter_differs() -> None:
    cache = make_cache([None, 40])
    compute(cache, TEXT[:64], 2)
    assert cache.match_length(make_sequence(TEXT[:65])) == 4
    assert cache.match_length(make_sequence(TEXT[:65], adapter="lora")) == 0


def test_events_are_those_of_the_first_group_when_all_tokens_are_retained_there() -> None:
    cache = make_cache([None, 40])
    owner = compute(cache, TEXT[:64], 2)
    (stored,) = cache.take_events()
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 4
    cache.evict(owner.more_page_tables[0][0])
    assert cache.take_events() == []
    cache.evict(owner.pages[3])
    (removed,) = cache.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [stored.block_hashes[3]]


def test_evicted_blocks_stay_reported_when_a_following_block_is_cached() -> None:
    """A gateway looks a prefix up from its first block, which a window's group evicts first."""
    cache = make_cache([40])
    owner = compute(cache, TEXT[:80], 1)
    cache.take_events()
    names = [wire_hash(key) for key in owner.keys[:5]]
    for page in owner.pages[:3]:
        cache.evict(page)
    assert cache.take_events() == []
    assert [chain.block_hashes for chain in cache.snapshot()] == [names]
    cache.evict(owner.pages[4])
    (removed,) = cache.take_events()
    assert removed == BlockRemoved(names[4:], medium="GPU", group_idx=0)
    cache.evict(owner.pages[3])
    (removed,) = cache.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == names[3::-1]
    assert cache.snapshot() == []


def test_parents_are_reported_again_when_a_running_sequence_continues_evicted_blocks() -> None:
    cache = make_cache([20])
    sequence = compute(cache, TEXT[:64], 1)
    for page in sequence.pages:
        cache.evict(page)
    sequence.pages = [64] * 4 + [cache.pool.allocate()]
    sequence.token_ids.extend(TEXT[64:80])
    sequence.num_computed = 80
    cache.take_events()
    cache.publish(sequence)
    (stored,) = cache.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [wire_hash(key) for key in sequence.keys[:5]]
    assert stored.parent_block_hash is None
    assert cache.snapshot() == [stored]


def test_nothing_is_left_when_all_blocks_are_forgotten() -> None:
    for windows in ([None, 40], [40]):
        cache = make_cache(windows)
        compute(cache, TEXT, len(windows))
        cache.take_events()
        cache.clear()
        assert sum(len(event.block_hashes) for event in cache.take_events() if isinstance(event, BlockRemoved)) == 12
        assert cache.match_length(make_sequence(TEXT)) == 0
        assert cache.snapshot() == []
