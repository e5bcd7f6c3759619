"""Hybrids with quantised weights on a CPU: logits are those of the weights that they stand for."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from tests.engine.models.test_models import VARIANTS
from tests.engine.models.test_quantization_on_load import rounded_by_loops
from tests.support.fp8_checkpoints import quantize_folder as quantize_to_fp8
from tests.support.integer_checkpoints import quantize_folder as quantize_to_integers
from tests.support.tiny_models import PageDealer, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
WIDE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
"""Widths that integers of groups fit."""
IN_DTYPE = ["mlp.gate", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b", "conv1d"]
"""Modules that FP8 checkpoints of Qwen3-Next and Qwen3.5 leave as they are."""
MAKERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "fp8-block": partial(quantize_to_fp8, form="fp8-block"),
    "fp8-channel": partial(quantize_to_fp8, form="compressed-channel"),
    "gptq": partial(quantize_to_integers, name="gptq"),
    "awq": partial(quantize_to_integers, name="awq"),
}


def logits_of(folder: Path, **settings: Any) -> torch.Tensor:
    runner = tiny_runner(folder, **settings)
    return run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])


def quantized_and_exact(folder: Path, variant: str, maker: str) -> None:
    """`folder/quantized`, and in `folder/exact` the weights that it stands for."""
    architecture, changes = VARIANTS[variant]
    save_tiny_model(folder / "exact", architecture, **changes | WIDE)
    shutil.copytree(folder / "exact", folder / "quantized")
    exact = MAKERS[maker](folder / "quantized")
    config = json.loads((folder / "quantized/config.json").read_text())
    ignored = "ignore" if maker == "fp8-channel" else "modules_to_not_convert"
    patterns = [f"re:.*{name}$" if maker == "fp8-channel" else name for name in IN_DTYPE]
    if maker == "gptq":
        config["quantization_config"]["dynamic"] = {rf"-:.*\.{name.rpartition('.')[2]}$": {} for name in IN_DTYPE}
    else:
        config["quantization_config"][ignored] = [*config["quantization_config"].get(ignored, []), *patterns]
    (folder / "quantized/config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in exact.items()}, folder / "exact/model.safetensors")


@pytest.mark.parametrize(
    ("variant", "maker"),
    [
        ("qwen3-next", "fp8-block"),
        ("qwen3-next", "awq"),
        ("qwen3.5-moe", "fp8-channel"),
        ("qwen3.5", "fp8-block"),
        ("qwen3.5", "gptq"),
    ],
)
def test_logits_equal_those_of_the_dequantised_weights(variant: str, maker: str, tmp_path: Path) -> None:
    """Rows of gated delta nets and of gated attention have another order here, and so have their scales."""
    quantized_and_exact(tmp_path, variant, maker)
    stored = load_file(tmp_path / "quantized/model.safetensors")
    assert any("linear_attn.in_proj_qkv" in name and "scale" in name for name in stored)
    assert (logits_of(tmp_path / "quantized") - logits_of(tmp_path / "exact")).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("qwen3-next", "int8"),
        ("qwen3.5", "int4"),
        ("granite-hybrid-moe", "fp8"),
        ("nemotron-3", "int8"),
        ("lfm2", "int4"),
    ],
)
def test_logits_equal_those_of_rounded_weights_when_they_are_quantised_on_load(
    variant: str, kind: Any, tmp_path: Path
) -> None:
    """All products but routers and the gate of a shared expert are rounded, whose rows have scales of their own."""
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path / "exact", architecture, **changes)
    before = logits_of(tmp_path / "exact")
    shutil.copytree(tmp_path / "exact", tmp_path / "rounded")
    path = tmp_path / "rounded/model.safetensors"
    tensors = load_file(path)
    kept = ("norm", "embed", "lm_head", ".gate.weight", "router", "shared_expert_gate", "conv1d", "conv.conv")
    for name, tensor in tensors.items():
        if tensor.ndim >= 2 and name.endswith("weight") and not any(each in name for each in kept):
            flat = tensor.reshape(-1, tensor.shape[-1])
            tensors[name] = rounded_by_loops(flat, kind).reshape(tensor.shape).contiguous()
    save_file(tensors, path)
    expected = logits_of(tmp_path / "rounded")
    assert (expected - before).abs().max() > 1e-2
    assert (logits_of(tmp_path / "exact", quantization=kind) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("variant", ["granite-hybrid-moe", "nemotron-3"])
def test_quantised_experts_are_refused_by_name_when_nothing_reads_them(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    quantize_to_fp8(tmp_path, "fp8-block")
    with pytest.raises(ModelError, match="experts"):
        tiny_runner(tmp_path)
