"""The owner of an engine's device memory: allocations by tag, and memory that goes back by tag."""

import os
from pathlib import Path

import pytest
import torch

from mini_infer_engine.kv_transfer.transports.shared_memory import SharedArray
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.runtime.memory.device_memory import DeviceMemory, MemoryTag
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from tests.support.tiny_models import LFM2, save_tiny_model, tiny_runner

CPU = torch.device("cpu")
MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_bytes_are_summed_by_tag_when_tensors_are_owned() -> None:
    memory = DeviceMemory(CPU)
    weights, pages = (
        [torch.empty(1_500_000, dtype=torch.uint8), torch.empty(500_000, dtype=torch.uint8)],
        torch.zeros(5),
    )
    memory.own(MemoryTag.WEIGHTS, [*weights, weights[0][:10]])
    memory.own(MemoryTag.KV_CACHE, [pages])
    memory.own(MemoryTag.WORKSPACE, [pages.view(-1)])  # the first tag of a storage stays its tag
    counted = {"weights": 2_000_000, "kv_cache": 20, "recurrent_state": 0, "graphs": 0, "workspace": 0}
    assert memory.bytes_by_tag() == counted
    assert str(memory) == "cpu: weights 0.00 GB, kv cache 0.00 GB"


def test_new_tensors_alone_are_owned_when_a_block_has_a_tag() -> None:
    memory, before = DeviceMemory(CPU), torch.zeros(1000)
    with memory.tag(MemoryTag.WORKSPACE), torch.inference_mode():
        made = torch.zeros((4, 8)).view(-1)[1:]
        part = before[10:]
        part.add_(torch.ones(990))  # ones are freed at once
    after = torch.zeros(1000)
    assert memory.bytes_by_tag()["workspace"] == 4 * 4 * 8
    del made
    assert memory.bytes_by_tag()["workspace"] == 0
    assert (part.sum(), after.sum()) == (990, 0)


def test_memory_goes_back_to_the_kernel_when_the_tag_of_a_pool_is_released() -> None:
    memory, spec = DeviceMemory(CPU), KVSpec(2, 64, 2, 64, torch.float32)
    pool = KVPool(spec, 64 * MIB // spec.page_bytes, CPU)
    memory.own(MemoryTag.KV_CACHE, [pool.storage])
    with memory.tag(MemoryTag.WORKSPACE):
        workspace = torch.full((10 * MIB,), 2.0)  # more than malloc ever keeps: its largest threshold is 32 MiB
    pool.storage.fill_(1)
    before = resident_bytes()
    assert memory.release(MemoryTag.KV_CACHE) == pool.storage.numel() * 4 > 64 * MIB
    assert before - resident_bytes() > 60 * MIB
    assert int(pool.storage.count_nonzero()) * 4 < 2 * 4096  # all whole memory pages
    assert memory.release(MemoryTag.WORKSPACE) == 40 * MIB
    assert before - resident_bytes() > 98 * MIB
    assert workspace.untyped_storage().nbytes() == 0
    assert set(memory.bytes_by_tag().values()) == {0}
    assert memory.release(MemoryTag.WORKSPACE) == 0


def test_shared_memory_is_freed_when_its_tag_is_released() -> None:
    shared, memory = SharedArray(MIB), DeviceMemory(CPU)
    pages = torch.from_numpy(shared.bytes)
    pages.fill_(1)
    assert os.fstat(shared.file).st_blocks > 0
    memory.own(MemoryTag.KV_CACHE, [pages])
    assert memory.release(MemoryTag.KV_CACHE) == MIB
    assert os.fstat(shared.file).st_blocks == 0


@pytest.mark.parametrize("tag", [tag for tag in MemoryTag if tag is not MemoryTag.RECURRENT_STATE])
def test_only_its_tag_loses_memory_when_an_engine_releases_one(tmp_path: Path, tag: MemoryTag) -> None:
    model = save_tiny_model(tmp_path, "qwen3")
    runner = tiny_runner(tmp_path)
    counted = runner.memory.bytes_by_tag()
    assert counted["weights"] >= sum(4 * parameter.numel() for parameter in model.parameters())
    assert counted["kv_cache"] == runner.pool.pages.numel() * 4
    assert 15_900_000 < counted["kv_cache"] <= 16_000_000
    assert counted["workspace"] > 0
    assert counted["graphs"] == 0
    freed = runner.memory.release(tag)
    left = runner.memory.bytes_by_tag()
    assert left == counted | {tag.value: counted[tag] - freed}
    assert freed > 0 or tag is MemoryTag.GRAPHS


def test_the_states_of_a_hybrid_lose_their_memory_when_their_tag_is_released(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "lfm2", **LFM2)
    runner = tiny_runner(tmp_path)
    assert runner.pool.states is not None
    counted, slots = runner.memory.bytes_by_tag(), runner.pool.states.slots
    assert counted["recurrent_state"] == slots.num_bytes > 0
    assert 15_900_000 < counted["kv_cache"] + counted["recurrent_state"] <= 16_000_000
    assert runner.memory.release(MemoryTag.RECURRENT_STATE) == slots.num_bytes
    assert runner.memory.bytes_by_tag() == counted | {"recurrent_state": 0}
