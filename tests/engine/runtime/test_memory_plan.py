"""What a GPU's pages may take: the rest of the share, behind weights, state, the largest pass and CUDA graphs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.runtime import memory_plan
from mini_infer_engine.runtime.cpu.executor import TorchExecutor
from mini_infer_engine.runtime.executor import Executor
from mini_infer_engine.runtime.memory_plan import MemoryInUse, _Needs, plan_memory

TOTAL, WEIGHTS, PAGE = 1_000_000, 200_000, 1_000
WORKER: Any = SimpleNamespace(
    device=torch.device("cuda"),
    page_bytes=lambda page_size, kv_cache: PAGE,
    config=SimpleNamespace(max_position_embeddings=512),
)
"""As far as a plan asks a worker."""


def plan(monkeypatch: pytest.MonkeyPatch, needs: _Needs, share: float = 0.8) -> memory_plan.MemoryPlan:
    before, now = MemoryInUse(free=TOTAL), MemoryInUse(free=TOTAL - WEIGHTS, reserved=WEIGHTS, allocated=WEIGHTS)
    monkeypatch.setattr(memory_plan, "_measure", lambda *_, **__: needs)
    monkeypatch.setattr(MemoryInUse, "of", lambda device: now)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (now.free, TOTAL))
    settings = EngineSettings(model="any", gpu_memory_utilization=share).resolved("cuda")
    return plan_memory(WORKER, cast("type[Executor]", TorchExecutor), settings, 16, before, UNIFORM)


@pytest.mark.parametrize("name", ["state", "peak", "graphs"])
def test_memory_plan_subtracts_all_other_needs_from_the_pages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    alone = plan(monkeypatch, _Needs(0, 0, 0))
    assert (alone.num_pages + 1) * PAGE == 0.8 * TOTAL - WEIGHTS, "with the null page"
    beside = plan(monkeypatch, _Needs(0, 0, 0)._replace(**{name: 150_000}))
    assert (alone.num_pages - beside.num_pages) * PAGE == 150_000
    assert getattr(beside, name) == 150_000


def test_memory_plan_fits_pool_and_graphs_at_full_utilisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs are captured after the pool is made: both together fit the device."""
    made = plan(monkeypatch, _Needs(state=10_000, peak=40_000, graphs=100_000), share=1.0)
    assert WEIGHTS + (made.num_pages + 1) * PAGE + made.state + made.peak + made.graphs <= TOTAL
