"""The tier in main memory: what comes back is what went, and a digest tells where it is not."""

import random

import numpy as np
import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.kv_tiers.tier_memory import Moved, PageMove, sealed
from mini_infer_engine.runtime.memory.host_tier import CpuHostTier, make_host_tier
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from tests.engine.runtime.test_kv_pool_and_attention import CPU, SPEC

NUM_PAGES = 6


def moved(tier: CpuHostTier) -> Moved:
    """Waits for the one copy that is under way."""
    while True:
        tier.wait(5.0)
        if ended := tier.take():
            (only,) = ended
            return only


@pytest.fixture
def tier() -> CpuHostTier:
    parts = [torch.randint(-(2**62), 2**62, (NUM_PAGES, width)) for width in (48, 5)]
    return CpuHostTier(parts, 4, b"identity")


def test_page_comes_back_to_another_place_when_it_was_stored(tier: CpuHostTier) -> None:
    before = [part.copy() for part in tier._parts]
    tier.store(1, [PageMove(2, 3), PageMove(4, 0)])
    stored = moved(tier)
    for part in tier._parts:
        part[[2, 4]] = 0
    tier.load(2, [PageMove(3, 1), PageMove(0, 5)])
    loaded = moved(tier)
    assert (stored.ticket, loaded.ticket, stored.error, loaded.error) == (1, 2, "", "")
    assert stored.digests == loaded.digests
    for old, new in zip(before, tier._parts, strict=True):
        assert np.array_equal(new[[1, 5]], old[[2, 4]])
        assert np.array_equal(new[[0, 3]], old[[0, 3]])


def test_every_bit_flip_is_found_when_pages_come_back(tier: CpuHostTier) -> None:
    draw = random.Random(1)
    tier.store(0, [PageMove(page, page) for page in range(4)])
    stored = moved(tier).digests
    found = 0
    for number in range(500):
        page, word, bit = draw.randrange(4), draw.randrange(53), np.uint64(1 << draw.randrange(64))
        tier.words[page, word] ^= bit
        tier.load(number, [PageMove(page, 5)])
        found += moved(tier).digests[0] != stored[page]
        tier.words[page, word] ^= bit
    assert found == 500


def test_exchanged_words_and_pages_are_found_when_pages_come_back(tier: CpuHostTier) -> None:
    tier.store(0, [PageMove(0, 0)])
    (stored,) = moved(tier).digests
    tier.words[0, [3, 17]] = tier.words[0, [17, 3]]
    tier.load(1, [PageMove(0, 5)])
    assert moved(tier).digests[0] != stored
    assert sealed(stored, b"one page", b"model") != sealed(stored, b"other page", b"model")
    assert sealed(stored, b"one page", b"model") != sealed(stored, b"one page", b"other model")


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
