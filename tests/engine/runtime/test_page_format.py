"""A page has one format: swap, main memory, the disk and transfers have the same bytes of it, for each kind of pool."""

import ctypes
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mini_infer_engine.core.batch import PageSwap, StateSwap, Transfers
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove, StateMove
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from mini_infer_engine.kv_disk.disk_store import DiskStore
from mini_infer_engine.kv_transfer.layout import KVMemory, Span, pieces, state_span
from mini_infer_engine.models.kv_spec import FP8, INT8, KVSpec
from mini_infer_engine.models.state_spec import StateSpec
from mini_infer_engine.runtime.memory.cpu_host_tier import CpuHostTier
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.make_host_tier import make_host_tier
from mini_infer_engine.runtime.memory.quantized_pool import make_pool
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from tests.engine.kv_disk.test_disk_store import moved as moved_on_disk
from tests.engine.kv_disk.test_page_header import record_of
from tests.engine.runtime.test_kv_pool_and_attention import CPU, SPEC
from tests.support.tier_copies import moved

POOLS = {
    "float32": SPEC,
    "bfloat16": KVSpec(2, 16, 2, 8, torch.bfloat16),
    "int8": KVSpec(2, 16, 2, 8, torch.float32, quantization=INT8),
    "fp8": KVSpec(2, 16, 2, 8, torch.bfloat16, quantization=FP8),
    "latents": KVSpec(2, 16, 1, 72, torch.bfloat16, entries=1),
}
PAGE, HOST_PAGE, CHECKPOINT = 3, 1, 1


def filled(spec: KVSpec) -> KVPool:
    """A pool whose pages have random bytes, and room for two swapped ones."""
    pool = make_pool(spec, 5, CPU, 2)
    (words,) = pool.words()
    words.copy_(torch.randint(-(2**62), 2**62, words.shape))
    return pool


def host_tier_of(pool: KVPool) -> CpuHostTier:
    tier = make_host_tier(pool, 1 << 20, b"model")
    assert isinstance(tier, CpuHostTier)
    return tier


def sent(memory: KVMemory, span: Span) -> bytes:
    """Returns what a transfer to an equal engine reads of this engine's pool, piece after piece."""
    table = pieces(memory.layout, memory.layout, span)
    return b"".join(ctypes.string_at(memory.address + ours, count) for ours, _, count in table.tolist())


@pytest.mark.parametrize("spec", [pytest.param(spec, id=name) for name, spec in POOLS.items()])
def test_every_way_has_the_same_bytes_of_a_page(spec: KVSpec, tmp_path: Path) -> None:
    pool = filled(spec)
    page = pool.words()[0][PAGE].numpy().tobytes()
    assert len(page) == pool.memory().layout.page_bytes

    pool.swap(Transfers(swap_out=[PageSwap(PAGE, HOST_PAGE)]))
    assert pool.host_pages[HOST_PAGE].view(torch.uint8).numpy().tobytes() == page

    tier = host_tier_of(pool)
    tier.store(0, [PageMove(PAGE, HOST_PAGE)])
    assert moved(tier).error == ""
    assert tier.page_memory(HOST_PAGE) == page

    disk = DiskStore(DiskFolder(tmp_path, "model"), 1 << 20, tier.page_bytes, 32, tier.page_memory)
    disk.write(0, HOST_PAGE, record_of(0))
    assert moved_on_disk(disk).error == ""
    assert any(page in file.read_bytes() for file in tmp_path.rglob("*.kv"))

    whole = Span([0, PAGE], [0, PAGE], spec.page_size, 2 * spec.page_size)
    by_layer = [Span(whole.our_pages, whole.their_pages, whole.begin, whole.end, layers) for layers in ((0, 1), (1, 2))]
    assert sent(pool.memory(), whole) == page
    assert b"".join(sent(pool.memory(), span) for span in by_layer) == page


def test_every_way_has_the_same_bytes_of_a_recurrent_state() -> None:
    pool = filled(SPEC)
    spec = StateSpec(num_layers=2, channels=6, width=3, state_shape=(2, 4, 4), dtype=torch.float32)
    pool.states = states = StatePool(spec, StateSlots(spec.slot_bytes, 2, 3), CPU, 2)
    states.storage.random_()
    slot = states.checkpoint_slot(CHECKPOINT)
    state = states.storage[slot].numpy().tobytes()

    states.swap(Transfers(states_out=[StateSwap(slot, HOST_PAGE)]))
    assert states.host_states[HOST_PAGE].numpy().tobytes() == state
    tier = host_tier_of(pool)
    pages = tuple(range(tier.pages_per_state))
    tier.store(0, [], [StateMove(CHECKPOINT, pages)])
    assert moved(tier).error == ""
    assert bytes(itertools.chain.from_iterable(map(tier.page_memory, pages)))[: len(state)] == state
    assert sent(states.memory(), state_span(slot, slot)) == state


def test_a_page_has_a_drafts_hidden_states_and_bounds_behind_its_keys_and_values() -> None:
    pool = filled(replace(SPEC, num_layers=4))
    pool.hidden = HiddenPages(5, SPEC.page_size, 6, torch.float32, CPU, 2)
    pool.hidden.pages.normal_()
    pool.bounds = KeyBounds(pool.spec, 5, 4, CPU, 2)
    pool.bounds.pages.normal_()
    parts = [part[PAGE].numpy().tobytes() for part in pool.words()]
    pool.swap(Transfers(swap_out=[PageSwap(PAGE, HOST_PAGE)]))
    tier = host_tier_of(pool)
    tier.store(0, [PageMove(PAGE, HOST_PAGE)])
    assert moved(tier).error == ""
    assert tier.page_memory(HOST_PAGE) == b"".join(parts)
    assert len(parts[2]) == KeyBounds.page_bytes(pool.spec)
    hosts = pool.host_pages, pool.hidden.host_pages, pool.bounds.host_pages
    assert [host[HOST_PAGE].numpy().tobytes() for host in hosts] == parts


def test_pages_have_another_identity_when_they_have_bounds_or_are_selected_by_another_budget() -> None:
    plain, pools = KVPool(SPEC, 5, CPU), [KVPool(SPEC, 5, CPU) for _ in range(3)]
    for pool, budget_pages in zip(pools, (4, 8, 4), strict=True):
        pool.bounds = KeyBounds(SPEC, 5, budget_pages, CPU)
    names = [pool.identity() for pool in (plain, *pools)]
    assert names[1] == names[3]
    assert len(set(names)) == 3
