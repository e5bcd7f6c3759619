"""Scratch memory of split kernels: one for each runner, grown without taking it from a kernel that still writes."""

from concurrent.futures import ThreadPoolExecutor

import torch

from mini_infer_engine.kernels.workspace import Workspace

CPU = torch.device("cpu")


def test_two_runners_share_no_workspace() -> None:
    first, second = Workspace(CPU), Workspace(CPU)
    assert first.counters.data_ptr() != second.counters.data_ptr()
    assert first.partials().data_ptr() != second.partials().data_ptr()
    first.partials(1 << 23)
    assert second.partials().numel() < 1 << 23


def test_workspace_keeps_memory_of_captured_graphs_when_it_grows() -> None:
    workspace = Workspace(CPU)
    before = workspace.partials()
    address, size = before.data_ptr(), before.numel()
    assert workspace.partials(size).data_ptr() == address
    del before
    grown = [workspace.partials(size + step) for step in (1, 2)]
    assert [memory.numel() for memory in grown] == [size + 1, size + 2]
    assert workspace.partials().numel() == size + 2
    assert address in {memory.data_ptr() for memory in workspace._outgrown}


def test_each_thread_gets_its_size_when_several_grow_the_workspace_at_once() -> None:
    workspace = Workspace(CPU)
    size = workspace.partials().numel()
    sizes = [size + (thread * 37) % 64 for thread in range(64)]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(workspace.partials, sizes))
    assert all(memory.numel() >= requested for memory, requested in zip(found, sizes, strict=True))
    assert workspace.partials().numel() == max(sizes)
