"""Quantised experts on a CPU: logits are those of the weights that they stand for."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.engine.models.test_quantization_on_load import rounded_by_loops
from tests.support.fp4_checkpoints import quantize_folder as quantize_to_fp4
from tests.support.fp8_checkpoints import quantize_folder as quantize_to_fp8
from tests.support.integer_checkpoints import quantize_folder as quantize_to_integers
from tests.support.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_MOE,
    MINIMAX_M2,
    PageDealer,
    run_chunks,
    save_tiny_model,
    tiny_runner,
)

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
QWEN = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN,
    "deepseek_v2": DEEPSEEK | {"moe_intermediate_size": 64},  # with two shared experts
    "deepseek_v3": DEEPSEEK_V3 | {"moe_intermediate_size": 96, "q_lora_rank": 64},
    "deepseek_v32": DEEPSEEK_V32 | {"moe_intermediate_size": 96, "q_lora_rank": 64},
    "glm4_moe": GLM_MOE | {"moe_intermediate_size": 64},
    "minimax_m2": MINIMAX_M2,
}
MAKERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "fp8-block": partial(quantize_to_fp8, form="fp8-block"),
    "fp8-channel": partial(quantize_to_fp8, form="compressed-channel"),
    "nvfp4": partial(quantize_to_fp4, form="nvfp4"),
    "awq": partial(quantize_to_integers, name="awq"),
    "gptq": partial(quantize_to_integers, name="gptq"),
    "w8a8": partial(quantize_to_integers, name="w8a8"),
}


def logits_of(runner: ModelRunner) -> torch.Tensor:
    return run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])


def quantized_and_exact(folder: Path, architecture: str, maker: Callable[[Path], dict[str, torch.Tensor]]) -> None:
    """`folder/quantized`, and in `folder/exact` the weights that it stands for."""
    save_tiny_model(folder / "exact", architecture, num_hidden_layers=2, **SHAPES[architecture])
    shutil.copytree(folder / "exact", folder / "quantized")
    exact = maker(folder / "quantized")
    assert any(".experts.0." in name for name in exact)
    save_file({name: weight.contiguous() for name, weight in exact.items()}, folder / "exact/model.safetensors")


@pytest.mark.parametrize(
    ("architecture", "maker"),
    [
        *(("qwen3_moe", maker) for maker in MAKERS),
        ("deepseek_v2", "fp8-channel"),
        ("deepseek_v2", "nvfp4"),
        ("deepseek_v3", "fp8-block"),
        ("deepseek_v32", "fp8-block"),
        *(("glm4_moe", maker) for maker in MAKERS),
        ("minimax_m2", "fp8-block"),
    ],
)
def test_logits_equal_those_of_the_dequantised_weights(architecture: str, maker: str, tmp_path: Path) -> None:
    quantized_and_exact(tmp_path, architecture, MAKERS[maker])
    runner = tiny_runner(tmp_path / "quantized")
    expected = logits_of(tiny_runner(tmp_path / "exact"))
    assert (logits_of(runner) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_experts_are_quantised_on_load(kind: Any, tmp_path: Path) -> None:
    """And routers are not: they would choose other experts."""
    save_tiny_model(tmp_path, "qwen3_moe", **QWEN)
    rounded = tiny_runner(tmp_path, quantization=kind)
    used = rounded.worker.weight_bytes
    actual = logits_of(rounded)
    plain = tiny_runner(tmp_path)
    assert used < (0.5 if kind != "fp8" else 0.7) * plain.worker.weight_bytes  # on a CPU FP8 is of experts alone
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = rounded_by_loops(weight, kind)
    save_file(tensors, tmp_path / "model.safetensors")
    assert (actual - logits_of(tiny_runner(tmp_path))).abs().max() <= 1e-3


def test_dummy_weights_of_a_quantised_checkpoint_run(tmp_path: Path) -> None:
    quantized_and_exact(tmp_path, "qwen3_moe", partial(quantize_to_fp4, form="mxfp4"))
    assert torch.isfinite(logits_of(tiny_runner(tmp_path / "quantized", load_format="dummy"))).all()


def test_an_experts_scheme_is_refused_before_weights_are_read_when_unsupported(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", **QWEN)
    quantize_to_integers(tmp_path, "gptq-act-order")
    with pytest.raises(ModelError, match="act-order"):
        tiny_runner(tmp_path)


def test_the_error_names_a_scale_before_allocation_when_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized_and_exact(tmp_path, "qwen3_moe", MAKERS["fp8-block"])
    file = tmp_path / "quantized/model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    with pytest.raises(ModelError, match=name):
        tiny_runner(tmp_path / "quantized")
