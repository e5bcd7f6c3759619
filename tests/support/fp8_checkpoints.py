"""Checkpoints in FP8 as their makers write them, made from unquantised ones, and what their weights stand for."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
FORMATS = ("fp8-tensor", "fp8-block", "compressed-tensor", "compressed-channel", "compressed-block")
QUANTIZED = (
    *("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight"),
    *("indexer.wk.weight", "indexer.wq_b.weight"),
    *("in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight"),
)
"""Ends of the names of quantised weights."""
BLOCK = (32, 32)
"""Rows and columns, neither of which divides every layer of the tiny models."""


def quantize_folder(folder: Path, form: str) -> dict[str, torch.Tensor]:
    """Rewrite a folder's linear layers in FP8; returns all of its weights dequantised, by name."""
    tensors = load_file(folder / "model.safetensors")
    written, exact = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(QUANTIZED) and not name.endswith("weights_proj.weight"):
            weight, scale, wide = quantized(tensor, form)
            written[name], exact[name] = weight, weight.float() * wide
            written[name + ("_scale_inv" if form == "fp8-block" else "_scale")] = scale
            if form == "compressed-tensor":
                written[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization_config(form)}
    (folder / "config.json").write_text(json.dumps(config))
    return exact


def quantized(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 weight, scale as the checkpoint has it, and that scale for each element."""
    rows, columns = weight.shape
    if form.endswith("tensor"):
        scale = weight.abs().max().reshape(1) / LARGEST
        wide = scale.expand(rows, columns)
    elif form.endswith("channel"):
        scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
        wide = scale.expand(rows, columns)
    else:
        padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK[1], 0, -rows % BLOCK[0]))
        blocks = padded.unflatten(1, (-1, BLOCK[1])).unflatten(0, (-1, BLOCK[0]))
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6) / LARGEST
        wide = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:rows, :columns]
    return (weight / wide).to(FP8), scale, wide


def quantization_config(form: str) -> dict[str, Any]:
    if form == "fp8-tensor":
        return {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if form == "fp8-block":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": form.split("-")[1]}
    if form == "compressed-block":
        weights["block_structure"] = list(BLOCK)
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
