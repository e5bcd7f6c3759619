"""Passes that tell of their layers while they compute, replayed and launched kernel by kernel."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from mini_infer_engine.runtime.inputs.layer_progress import LayerCounters
from mini_infer_engine.runtime.model_runner import make_runner
from tests.gpu.device import DEVICE, KERNELS, ON_GPU
from tests.gpu.runs import make_settings
from tests.support.tiny_models import save_tiny_model

pytestmark = KERNELS


def test_each_layer_is_reported_by_itself() -> None:
    counters = LayerCounters(3, DEVICE)
    first, found = counters.begin(), list[int]()
    for layer in range(3):
        counters.mark(layer)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        found.append(first.num_done())
    second = counters.begin()
    counters.mark(0)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert (found, first.num_done(), second.num_done()) == ([1, 2, 3], 3, 1)


@pytest.mark.parametrize("eager", [False, True], ids=["replayed", "eager"])
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_layers_are_reported_while_the_pass_computes(tmp_path: Path, eager: bool) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64)
    settings = make_settings(tmp_path, enforce_eager=eager)
    runner = make_runner(settings, read_config(tmp_path), tmp_path, CudaExecutor, reports_layers=True)
    reported: list[LayerProgress] = []
    num_layers = runner.kv_memory().layout.num_layers
    for turn in range(3):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # torch's; a tenth of a second
        row = Row(0, 0, 100, list(range(100)), [turn], SamplingParams())
        handle = runner.launch(Batch([row], 0, report_layers=reported.append))
        assert reported[-1].num_done() == 0
        runner.collect(handle)
        assert [layers.num_done() for layers in reported] == [num_layers] * (turn + 1)
