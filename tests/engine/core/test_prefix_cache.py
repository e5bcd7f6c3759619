"""Prefix hits at a grain of sixteen tokens in pages of any size, copies of equal blocks, events."""

import pytest

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_contract.events import BlockRemoved, BlockStored, wire_hash
from mini_infer_engine.core.prefix_cache import Hit, PrefixCache
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence

TEXT = [n * 7 % 1000 for n in range(1000)]


def make_sequence(token_ids: list[int], salt: str = "") -> Sequence:
    return Sequence(
        Request(request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams(), cache_salt=salt),
        order=(0, 0),
        arrival_s=0,
        root=root_key("revision", salt=salt),
        last_position=2_000,
        stops=frozenset(),
        suppressed=(),
    )


def compute(cache: PrefixCache, token_ids: list[int], salt: str = "") -> Sequence:
    """A sequence that has all its tokens in pages of its own."""
    sequence = make_sequence(token_ids, salt)
    sequence.pages = [cache.pool.allocate() for _ in range(cache.pool.pages_for(len(token_ids)))]
    sequence.num_computed = len(token_ids)
    cache.publish(sequence)
    return sequence


def release(cache: PrefixCache, sequence: Sequence) -> None:
    for page in reversed(sequence.pages):
        cache.pool.release(page)


@pytest.mark.parametrize(
    ("page_size", "shared", "length", "num_tokens", "num_pages", "tail_index"),
    [
        (256, 100, 400, 96, 0, 0),
        (256, 15, 400, 0, 0, None),
        (256, 256, 400, 256, 1, None),
        (256, 256, 256, 240, 0, 0),  # one token is always computed
        (256, 257, 257, 256, 1, None),
        (256, 300, 300, 288, 1, 1),
        (256, 600, 600, 592, 2, 2),
        (256, 1000, 1000, 592, 2, 2),  # 600 tokens are cached, 592 in full blocks
        (32, 100, 400, 96, 3, None),
        (32, 112, 112, 96, 3, None),
        (32, 113, 113, 112, 3, 3),
        (16, 100, 400, 96, 6, None),
        (16, 32, 32, 16, 1, None),
    ],
)
def test_prefix_hits_have_a_granularity_of_16_tokens_for_any_page_size(
    page_size: int, shared: int, length: int, num_tokens: int, num_pages: int, tail_index: int | None
) -> None:
    cache = PrefixCache(64, page_size)
    owner = compute(cache, TEXT[:600])
    new = make_sequence(TEXT[:shared] + [9_999] * (length - shared))
    tail_page = None if tail_index is None else owner.pages[tail_index]
    assert cache.match(new) == Hit(num_tokens, owner.pages[:num_pages], tail_page)


def test_prefixes_are_not_shared_when_the_salt_differs() -> None:
    cache = PrefixCache(8, 16)
    compute(cache, TEXT[:64], salt="tenant")
    assert cache.match_length(make_sequence(TEXT[:64])) == 0
    assert cache.match_length(make_sequence(TEXT[:64], "tenant")) == 3
    (stored,) = cache.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [("tenant",), None, None, None]


def test_block_events_are_emitted_for_the_first_copy_and_the_last_removal() -> None:
    cache = PrefixCache(5, 32)
    first = compute(cache, TEXT[:64])
    keys = [wire_hash(key) for key in block_keys(TEXT[:64], root_key("revision"))]
    (stored,) = cache.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == (keys, None, TEXT[:64])

    second = compute(cache, TEXT[:64])
    assert cache.match(second).pages == first.pages[:1]
    release(cache, first)
    assert cache.pool.num_cached == 0  # the same is in use elsewhere: these pages are the first to be given away
    assert cache.match(second).pages == second.pages[:1]
    release(cache, second)
    assert cache.pool.num_cached == 2
    assert cache.take_events() == []

    for _ in range(5):
        cache.pool.allocate()
    removed = cache.take_events()
    assert all(isinstance(event, BlockRemoved) for event in removed)
    assert [event.block_hashes for event in removed] == [keys[2:], keys[:2]]  # the end of a prefix goes first
    assert cache.snapshot() == []


def test_the_copy_that_stays_counts_as_used_when_the_other_goes() -> None:
    cache = PrefixCache(4, 16)
    old, other = compute(cache, TEXT[:16]), compute(cache, TEXT[100:116])
    release(cache, old)
    release(cache, other)
    release(cache, compute(cache, TEXT[:16]))  # as a prompt of sixteen tokens would: its only block cannot hit
    assert cache.pool.num_cached == 2
    for _ in range(3):  # two blank ones, then the least recently used
        cache.pool.allocate()
    assert cache.match_length(make_sequence(TEXT[:17])) == 1
    assert cache.match_length(make_sequence(TEXT[100:117])) == 0


def test_only_full_blocks_of_known_and_launched_tokens_are_registered() -> None:
    cache = PrefixCache(4, 32)
    sequence = make_sequence(TEXT[:40])
    sequence.pages = [cache.pool.allocate(), cache.pool.allocate()]
    for num_computed, num_published in ((15, 0), (16, 1), (40, 2), (41, 2)):
        sequence.num_computed = num_computed
        cache.publish(sequence)
        assert sequence.num_published == num_published
    sequence.token_ids.extend(TEXT[40:60])
    sequence.num_computed = 47
    cache.publish(sequence)
    assert sequence.num_published == 2
    sequence.num_computed = 48
    cache.publish(sequence)
    assert [len(chain.block_hashes) for chain in cache.snapshot()] == [3]
