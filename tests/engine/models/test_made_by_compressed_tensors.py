"""Checkpoints that compressed-tensors itself writes: logits are those of the weights that it reads in them."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install compressed-tensors")

from compressed_tensors import ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    generate_gparam,
    is_module_quantized,
    maybe_pad_tensor_for_block_quant,
)

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
"""Rows of two and of three groups of 128; keys and values have 64 rows, half a block of 128."""


def weight_only(**weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


PRESETS = (
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4"),
)
SCHEMES = {name: preset_name_to_scheme(name, ["Linear"]) for name in PRESETS} | {
    # Of columns that stay in place: weight_g_idx, which test_integer_checkpoints.py has, is no longer written.
    "W4A16, act-order": weight_only(num_bits=4, group_size=128, actorder="weight"),
    "W4A16, asymmetric channels": weight_only(num_bits=4, group_size=-1, symmetric=False),
    "W8A16, channels": weight_only(num_bits=8, group_size=-1),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_decompressed_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package decompresses 4-bit floats to bf16, which rounds their products with NVFP4's scales.
    unpack = partial(unpack_fp4_from_uint8, dtype=torch.float32)
    monkeypatch.setattr("compressed_tensors.compressors.nvfp4.base.unpack_fp4_from_uint8", unpack)
    model = save_tiny_model(tmp_path, "qwen2", **SHAPE)
    unquantised = reference_logits(model, TOKENS)
    model.load_state_dict(quantize_folder(tmp_path, copy.deepcopy(model), SCHEMES[name]), strict=False)
    expected = reference_logits(model, TOKENS)
    assert (expected - unquantised).abs().max() > 1e-2
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - expected).abs().max() <= 1e-3


def quantize_folder(folder: Path, model: Any, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Rewrite the linear layers of the model's folder; returns all weights decompressed, by name."""
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for layer in filter(is_module_quantized, model.modules()):
        choose_scales(layer, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    weights: dict[str, Tensor] = model.state_dict()
    return weights


@torch.no_grad()
def choose_scales(layer: Any, args: QuantizationArgs) -> None:
    """From the extremes of the weights that share a scale, as llm-compressor does; those of activations are 1."""
    shapes = {"tensor": layer.weight.shape, "channel": (1, layer.weight.shape[1]), "block": args.block_structure}
    rows, columns = shapes.get(args.strategy) or (1, args.group_size)
    padded = maybe_pad_tensor_for_block_quant(layer.weight, (rows, columns))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    made = dict.fromkeys(("input_scale", "input_global_scale"), torch.ones(1))
    if args.strategy == "tensor_group":
        made["weight_global_scale"] = generate_gparam(*layer.weight.aminmax())
    made["weight_scale"], made["weight_zero_point"] = calculate_qparams(
        blocks.amin((1, 3)), blocks.amax((1, 3)), args, made.get("weight_global_scale")
    )
    for name, tensor in made.items():
        if hasattr(layer, name):
            getattr(layer, name).copy_(tensor.view_as(getattr(layer, name)))
