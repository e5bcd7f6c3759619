"""Weights go from one engine's GPU memory to another's as they are there: packed, rounded, in the kernels' order."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.weight_transfer.model_tensors import ModelTensors
from tests.engine.weight_transfer.weight_engines import exchange, free_port
from tests.gpu.device import INTERPRETED
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

ON_A_GPU = pytest.mark.skipif(INTERPRETED, reason="whole models are too slow for the interpreter: needs an NVIDIA GPU")


@ON_A_GPU
@pytest.mark.parametrize(
    ("architecture", "settings", "defers"),
    [
        ("qwen2", {"dtype": "bfloat16"}, False),
        ("qwen2", {"dtype": "bfloat16"}, True),
        ("qwen3", {"dtype": "bfloat16"}, True),
        ("qwen2", {"dtype": "bfloat16", "quantization": "fp8", "quantize_lm_head": True}, False),
        ("qwen2", {"dtype": "bfloat16", "quantization": "int4"}, False),
        ("qwen3_moe", {"dtype": "bfloat16", "quantization": "int8"}, False),
    ],
    ids=["bf16", "beside kernels", "norms of keys beside kernels", "fp8", "int4", "experts in int8"],
)
def test_texts_are_equal_when_weights_come_from_a_peers_gpu(
    architecture: str, settings: dict[str, Any], defers: bool, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, architecture, head_dim=32, hidden_size=256, intermediate_size=384)
    chosen = make_settings(tmp_path, weights_from="peers", **settings)
    port = free_port()
    source = make_runner(chosen, weights=exchange(port))
    assert source.weight_server is not None
    try:
        copy = make_runner(chosen, weights=exchange(0, port), defers=defers)
    finally:
        source.weight_server.close()
    assert copy.loaded.source == "peer", copy.loaded
    ours, theirs = ModelTensors(source.worker.model), ModelTensors(copy.worker.model)
    assert ours.specs == theirs.specs
    for index, spec in enumerate(ours.specs):
        assert torch.equal(ours.flat(index), theirs.flat(index)), spec.name
    requests = mixed_requests(6, 199, 60)
    assert texts(make_engine(chosen, source), requests) == texts(make_engine(chosen, copy), requests)
