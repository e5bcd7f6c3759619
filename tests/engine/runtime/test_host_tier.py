"""The tier in main memory: what comes back is what went, and a digest tells where it is not."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove, StateMove, sealed
from mini_infer_engine.runtime.memory.cpu_host_tier import CpuHostTier
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages
from mini_infer_engine.runtime.memory.host_tier import runs
from mini_infer_engine.runtime.memory.int4_rows import pack_rows, row_bytes, unpack_rows
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.make_host_tier import make_host_tier
from mini_infer_engine.runtime.memory.page_codec import PackedPages, RawPages
from tests.engine.runtime.test_kv_pool_and_attention import CPU, SPEC
from tests.support.tier_copies import flips_found, moved

NUM_PAGES = 6


@pytest.fixture
def tier() -> CpuHostTier:
    parts = [torch.randint(-(2**62), 2**62, (NUM_PAGES, width)) for width in (48, 5)]
    return CpuHostTier(RawPages(parts), 4, b"identity")


def test_page_comes_back_to_another_place_when_it_was_stored(tier: CpuHostTier) -> None:
    before = [part.copy() for part in tier._loading.parts]
    tier.store(1, [PageMove(2, 3), PageMove(4, 0)])
    stored = moved(tier)
    for part in tier._loading.parts:
        part[[2, 4]] = 0
    tier.load(2, [PageMove(3, 1), PageMove(0, 5)])
    loaded = moved(tier)
    assert (stored.ticket, loaded.ticket, stored.error, loaded.error) == (1, 2, "", "")
    assert stored.digests == loaded.digests
    for old, new in zip(before, tier._loading.parts, strict=True):
        assert np.array_equal(new[[1, 5]], old[[2, 4]])
        assert np.array_equal(new[[0, 3]], old[[0, 3]])


def test_every_bit_flip_is_found_when_pages_come_back(tier: CpuHostTier) -> None:
    tier.store(0, [PageMove(page, page) for page in range(4)])
    assert tier.words.shape == (4, 53)
    assert flips_found(tier, tier.load, moved(tier).digests, 500, target=5) == 500


def test_exchanged_words_and_pages_are_found_when_pages_come_back(tier: CpuHostTier) -> None:
    tier.store(0, [PageMove(0, 0)])
    (stored,) = moved(tier).digests
    tier.words[0, [3, 17]] = tier.words[0, [17, 3]]
    tier.load(1, [PageMove(0, 5)])
    assert moved(tier).digests[0] != stored
    assert sealed(stored, b"one page", b"model") != sealed(stored, b"other page", b"model")
    assert sealed(stored, b"one page", b"model") != sealed(stored, b"one page", b"other model")


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ((), []),
        ((4,), [(0, 4, 1)]),
        ((4, 5, 6), [(0, 4, 3)]),
        ((6, 5, 4), [(0, 6, 1), (1, 5, 1), (2, 4, 1)]),
        ((1, 2, 7, 8, 3), [(0, 1, 2), (2, 7, 2), (4, 3, 1)]),
    ],
)
def test_runs_are_consecutive_pages(pages: tuple[int, ...], expected: list[tuple[int, int, int]]) -> None:
    assert list(runs(pages)) == expected


@pytest.mark.parametrize("num_words", [30, 53, 120])
@pytest.mark.parametrize("pages", [(0, 1, 2), (6, 3, 4)])
def test_state_comes_back_to_another_checkpoint_when_it_was_stored(num_words: int, pages: tuple[int, ...]) -> None:
    """A page has 53 words."""
    parts = [torch.randint(-(2**62), 2**62, (NUM_PAGES, width)) for width in (48, 5)]
    states = torch.randint(-(2**62), 2**62, (3, num_words))
    before, own = states.clone(), pages[: -(-num_words // 53)]
    tier = CpuHostTier(RawPages(parts), 8, b"identity", None, states, len(own))
    tier.store(1, [PageMove(2, 7)], [StateMove(1, own)])
    stored = moved(tier)
    states[:2] = 0
    tier.load(2, [PageMove(7, 0)], [StateMove(0, own)])
    loaded = moved(tier)
    assert (stored.error, loaded.error, len(loaded.digests)) == ("", "", 2)
    assert stored.digests == loaded.digests
    assert torch.equal(states[0], before[1])
    assert torch.equal(states[2], before[2])
    assert torch.equal(parts[0][0], parts[0][2])
    for page in own:
        tier.words[page, (num_words - 1) % 53] ^= np.uint64(1)
        tier.load(3, [], [StateMove(0, own)])
        assert moved(tier).digests != stored.digests[1:]
        tier.words[page, (num_words - 1) % 53] ^= np.uint64(1)


def test_copy_ends_with_an_error_when_it_cannot_be_made(tier: CpuHostTier) -> None:
    tier.store(7, [PageMove(0, 99)])
    assert moved(tier).error.startswith("IndexError")
    tier.store(8, [PageMove(0, 1)])
    assert moved(tier).error == ""


def test_tier_has_whole_pages_when_its_size_is_given() -> None:
    pool = KVPool(SPEC, NUM_PAGES, CPU)
    page_bytes = SPEC.page_bytes
    tier = make_host_tier(pool, 3 * page_bytes + 5, b"")
    assert tier is not None
    assert (tier.num_pages, tier.page_bytes) == (3, page_bytes)
    assert len(tier.page_memory(2)) == page_bytes
    assert make_host_tier(pool, 0, b"") is None
    with pytest.raises(ModelError, match="kv_host_memory"):
        make_host_tier(pool, page_bytes - 1, b"")


WIDE = replace(SPEC, head_dim=32)


def packed_pool(*, page_size: int = 16, hidden_width: int = 0, budget_pages: int = 0) -> KVPool:
    layers = 4 if budget_pages else WIDE.num_layers
    pool = KVPool(replace(WIDE, page_size=page_size, num_layers=layers), NUM_PAGES, CPU)
    generator = torch.Generator().manual_seed(3)
    pool.storage[:-1] = torch.randn(pool.storage[:-1].shape, generator=generator)
    if hidden_width:
        pool.hidden = HiddenPages(NUM_PAGES, page_size, hidden_width, torch.bfloat16, CPU)
        pool.hidden.pages[:] = torch.randn(pool.hidden.pages.shape, generator=generator).bfloat16()
    if budget_pages:
        pool.bounds = KeyBounds(pool.spec, NUM_PAGES, budget_pages, CPU)
        pool.bounds.pages[:] = torch.randn(pool.bounds.pages.shape, generator=generator)
    return pool


def packed_tier(pool: KVPool) -> CpuHostTier:
    tier = make_host_tier(pool, 4_000_000, b"identity", "int4")
    assert isinstance(tier, CpuHostTier)
    return tier


@pytest.mark.parametrize(("hidden_width", "budget_pages"), [(0, 0), (24, 0), (0, 4), (24, 4)])
def test_packed_page_comes_back_as_its_rows_were_rounded(hidden_width: int, budget_pages: int) -> None:
    """Parts beside keys and values come back bit by bit."""
    pool = packed_pool(hidden_width=hidden_width, budget_pages=budget_pages)
    rows = pool.storage[2].view(-1, 32).clone()
    beside = [(part, part.clone()) for part in pool.words()[1:]]
    assert len(beside) == (hidden_width > 0) + (budget_pages > 0)
    tier = packed_tier(pool)
    tier.store(0, [PageMove(2, 1), PageMove(3, 0)])
    stored = moved(tier)
    others = pool.storage[[0, 1, 3, 4]].clone()
    tier.load(1, [PageMove(1, 5)])
    loaded = moved(tier)
    assert (stored.error, loaded.error) == ("", "")
    assert loaded.digests == stored.digests[:1] != stored.digests[1:]
    assert torch.equal(pool.storage[5].view(-1, 32), unpack_rows(*pack_rows(rows), torch.float32))
    assert torch.equal(pool.storage[[0, 1, 3, 4]], others)
    for part, before in beside:
        assert torch.equal(part[5], before[2])
        assert torch.equal(part[:5], before[:5])


@pytest.mark.parametrize(("page_size", "aligned"), [(16, False), (1024, True)])
def test_packed_page_takes_the_bytes_of_its_rows_and_little_more(page_size: int, aligned: bool) -> None:
    pool = packed_pool(page_size=page_size)
    least = pool.storage.shape[1] // 32 * row_bytes(32)
    tier = packed_tier(pool)
    assert least <= tier.page_bytes < least + 4096
    assert tier.page_bytes % (4096 if aligned else 8) == 0
    assert tier.num_pages == 4_000_000 // tier.page_bytes


def test_identity_names_the_format_when_pages_are_packed() -> None:
    raw = make_host_tier(packed_pool(), 4_000_000, b"identity")
    assert raw is not None
    assert raw.identity == b"identity"
    assert packed_tier(packed_pool()).identity not in (raw.identity, b"")


def test_every_bit_flip_is_found_when_packed_pages_come_back() -> None:
    tier, draw = packed_tier(packed_pool()), random.Random(1)
    tier.store(0, [PageMove(page, page) for page in range(4)])
    stored = moved(tier).digests
    found = 0
    for number in range(200):
        page, word, bit = draw.randrange(4), draw.randrange(tier.words.shape[1]), np.uint64(1 << draw.randrange(64))
        tier.words[page, word] ^= bit
        tier.load(number, [PageMove(page, 5)])
        found += moved(tier).digests[0] != stored[page]
        tier.words[page, word] ^= bit
    assert found == 200


def test_codecs_do_not_share_staging_memory_when_copies_overlap() -> None:
    pool = packed_pool()
    one = PackedPages(pool.storage, 32, (), torch.float32)
    other = one.for_another_stream()
    before = pool.storage.clone()
    rows, next_rows, others = one.rows_of([1, 2]), one.rows_of([5]), other.rows_of([3])
    one.encode([1, 2], rows)
    one.encode([5], next_rows)  # the next batch, while this one is copied
    other.encode([3], others)
    one.decode([4, 5], rows)
    one.decode([1], next_rows)
    other.decode([0], others)
    for source, target in ((1, 4), (2, 5), (5, 1), (3, 0)):
        expected = unpack_rows(*pack_rows(before[source].view(-1, 32)), torch.float32)
        assert torch.equal(pool.storage[target].view(-1, 32), expected)
