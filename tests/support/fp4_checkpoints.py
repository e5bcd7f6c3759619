"""Checkpoints in NVFP4 and MXFP4 as their makers write them, made from unquantised ones, and what they stand for.

After compressed-tensors' `NVFP4PackedCompressor` and `MXFP4PackedCompressor`, and modelopt's NVFP4QTensor.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMATS = ("nvfp4", "nvfp4a16", "mxfp4", "modelopt", "modelopt-file")
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def quantize_folder(folder: Path, form: str) -> dict[str, Tensor]:
    """Rewrite a folder's linear layers as a format; returns all of its weights dequantised, by name."""
    tensors = load_file(folder / "model.safetensors")
    written, exact = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        if key.endswith(("_proj.weight", "_with_mqa.weight")):
            del written[key]
            stored, exact[key] = quantized(weight, form)
            written |= {key.removesuffix("weight") + part: tensor for part, tensor in stored.items()}
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if form == "modelopt-file":
        (folder / "hf_quant_config.json").write_text(json.dumps(_modelopt_file()))
    else:
        config["quantization_config"] = quantization_config(form)
    (folder / "config.json").write_text(json.dumps(config))
    return exact


def quantized(weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    group = 32 if form == "mxfp4" else 16
    groups = weight.unflatten(1, (-1, group))
    largest = groups.abs().amax(2)
    if form == "mxfp4":
        exponents = largest.clamp(min=2.0**-100).log2().floor() - 2
        stored = {"weight_scale": (exponents + 127).to(torch.uint8)}
        scales = 2.0**exponents
    else:
        divisor = 6 * 448 / weight.abs().max().float()
        local = (largest / 6 * divisor).to(torch.float8_e4m3fn)
        stored = {"weight_scale": local}
        if form.startswith("modelopt"):
            stored |= {"weight_scale_2": divisor.reciprocal().reshape(()), "input_scale": torch.tensor(0.1)}
            scales = local.float() * divisor.reciprocal()
        else:
            stored |= {"weight_global_scale": divisor.reshape(1)}
            scales = local.float() / divisor
            if form == "nvfp4":
                stored["input_global_scale"] = torch.ones(1)
    nearest = (groups / scales.unsqueeze(2)).unsqueeze(-1).sub(VALUES).abs().argmin(-1)
    exact = (VALUES[nearest] * scales.unsqueeze(2)).flatten(1)
    nibbles = nearest.flatten(1).to(torch.uint8)
    name = "weight" if form.startswith("modelopt") else "weight_packed"
    return {name: nibbles[:, ::2] | (nibbles[:, 1::2] << 4)} | stored, exact


def quantization_config(form: str) -> dict[str, Any]:
    if form == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {}}
    strategy, group = ("group", 32) if form == "mxfp4" else ("tensor_group", 16)
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True}
    activations = weights | {"dynamic": "local"} if form == "nvfp4" else None
    return {
        "quant_method": "compressed-tensors",
        "format": f"{'mxfp4' if form == 'mxfp4' else 'nvfp4'}-pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
        "ignore": ["lm_head"],
    }


def _modelopt_file() -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.23.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.embed_tokens*"],
        },
    }


def quantize_stacked_experts(folder: Path) -> dict[str, Tensor]:
    """Rewrite a folder's experts as gpt-oss has them in MXFP4; returns all of its weights dequantised, by name.

    After transformers' integrations/mxfp4.py: blocks [experts, rows, groups, 16], scales [experts, rows, groups].
    """
    tensors = load_file(folder / "model.safetensors")
    written, exact = dict(tensors), dict(tensors)
    for key, stack in tensors.items():
        if not key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            continue
        del written[key]
        rows = stack.transpose(1, 2)  # [experts, rows, columns]
        stored, dequantised = quantized(rows.flatten(0, 1), "mxfp4")
        groups = (len(rows), rows.shape[1], -1)
        written[f"{key}_blocks"] = stored["weight_packed"].view(*groups, 16)
        written[f"{key}_scales"] = stored["weight_scale"].view(groups)
        exact[key] = dequantised.view_as(rows).transpose(1, 2).contiguous()
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    return exact
