"""What an engine keeps on its device, by use."""

from pathlib import Path

import torch

from mini_infer_engine.runtime.memory.device_memory import DeviceMemory, MemoryTag
from tests.support.tiny_models import save_tiny_model, tiny_runner


def test_bytes_are_summed_by_tag() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    memory.add(MemoryTag.WEIGHTS, 1_500_000_000)
    memory.add(MemoryTag.WEIGHTS, 500_000_000)
    memory.add(MemoryTag.KV_CACHE, 20_000_000)
    assert memory.bytes_by_tag() == {"weights": 2_000_000_000, "kv_cache": 20_000_000, "graphs": 0, "workspace": 0}
    assert str(memory) == "cpu: weights 2.00 GB, kv cache 0.02 GB"


def test_weights_and_pages_are_counted_when_a_model_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen3")
    runner = tiny_runner(tmp_path)
    counted = runner.memory.bytes_by_tag()
    assert counted["weights"] >= sum(4 * parameter.numel() for parameter in model.parameters())
    assert counted["kv_cache"] == runner.pool.pages.numel() * 4
    assert 15_900_000 < counted["kv_cache"] <= 16_000_000
