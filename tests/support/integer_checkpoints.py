"""Checkpoints with integer weights as their makers write them, made from unquantised ones, and what they stand for.

Packed after the formats' own code: autoawq's `WQLinear_GEMM`, gptqmodel's `pack`, compressed-tensors' `pack_to_int32`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.fp8_checkpoints import QUANTIZED

GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "gptq-act-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    "gptq-8-rows": {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": False},
    "gptq-v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "w4a16": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": True},
    "w4a16-asymmetric": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
    "w4a16-act-order": {
        "num_bits": 4,
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "actorder": "group",
    },
    "w8a16-packed": {"num_bits": 8, "strategy": "channel", "symmetric": True},
    "w8a8": {
        "num_bits": 8,
        "strategy": "channel",
        "symmetric": True,
        "format": "int-quantized",
        "activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
    },
    "w8a8-tensor-asymmetric": {
        "num_bits": 8,
        "strategy": "tensor",
        "symmetric": False,
        "format": "int-quantized",
    },
}


def quantize_folder(folder: Path, name: str, *, head: bool = False) -> dict[str, Tensor]:
    """Rewrite a folder's linear layers as a format, the head if asked for; returns all weights dequantised, by name."""
    form, tensors = FORMATS[name], load_file(folder / "model.safetensors")
    written, exact = dict(tensors), dict(tensors)
    for seed, (key, weight) in enumerate(sorted(tensors.items())):
        if key.endswith(QUANTIZED) or (head and key == "lm_head.weight"):
            del written[key]
            stored, exact[key] = quantized(weight, form, seed)
            written |= {key.removesuffix("weight") + part: tensor.contiguous() for part, tensor in stored.items()}
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": quantization_config(form, head=head)
    }
    (folder / "config.json").write_text(json.dumps(config))
    return exact


def quantized(weight: Tensor, form: dict[str, Any], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Round to nearest; groups are of neighbouring columns, or, with an act order, of columns in a random order."""
    bits = form.get("bits", form.get("num_bits"))
    group = form.get("group_size", -1)
    group = weight.shape[1] if group == -1 else group
    strange = form.get("desc_act") or form.get("actorder")
    groups = torch.arange(weight.shape[1]) // group
    if strange:
        groups = groups[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))]
    symmetric = form.get("sym", form.get("symmetric", not form.get("zero_point", False)))
    integers, scales, zeros = _rounded(weight, groups, bits, symmetric, whole=form.get("strategy") == "tensor")
    scales = scales.half().float()
    exact = (integers - zeros[:, groups]) * scales[:, groups]
    index = {"weight_g_idx" if "num_bits" in form else "g_idx": groups.int()}
    if form.get("quant_method") == "gptq":
        less = 0 if form.get("checkpoint_format") == "gptq_v2" else 1
        stored = {
            "qweight": packed(integers.t(), bits, 0),
            "qzeros": packed((zeros.t() - less) % (1 << bits), bits, 1),
            "scales": scales.t().half(),
            **index,
        }
    elif form.get("quant_method") == "awq":
        stored = {
            "qweight": packed(_awq_order(integers.t()), bits, 1),
            "qzeros": packed(_awq_order(zeros.t()), bits, 1),
            "scales": scales.t().half(),
        }
    elif form.get("format") == "int-quantized":
        middle = 1 << (bits - 1)
        count = 1 if form["strategy"] == "tensor" else weight.shape[0]
        stored = {"weight": (integers - middle).to(torch.int8), "weight_scale": scales[:count]}
        if not symmetric:
            stored["weight_zero_point"] = (zeros[:count] - middle).to(torch.int8)
    else:
        stored = {
            "weight_packed": packed(integers, bits, 1),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
            **(index if strange else {}),
        }
        if not symmetric:
            stored["weight_zero_point"] = packed(zeros, bits, 0)
    return stored, exact


def _rounded(
    weight: Tensor, groups: Tensor, bits: int, symmetric: bool, *, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers [rows, columns], scales and zero points [rows, groups], as floats."""
    largest, scales, zeros = (1 << bits) - 1, [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = (f(part, 1) for f in (torch.amin, torch.amax))
        if whole:
            low, high = low.amin().expand_as(low), high.amax().expand_as(high)
        if symmetric:
            scales.append(torch.maximum(-low, high) * 2 / largest)
            zeros.append(torch.full_like(low, 1 << (bits - 1)))
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scales.append((high - low) / largest)
            zeros.append((-low / scales[-1]).round())
    scale, zero = torch.stack(scales, 1).half().float(), torch.stack(zeros, 1)
    integers = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, largest)
    return integers, scale, zero


def packed(integers: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned integers in int32 words along a dimension, the first in the lowest bits."""
    columns = integers.long() if dim == 1 else integers.t().long()
    in_a_word = 32 // bits
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[1] % in_a_word))
    words = torch.zeros(padded.shape[0], padded.shape[1] // in_a_word, dtype=torch.int64)
    for place in range(in_a_word):
        words |= padded[:, place::in_a_word] << (place * bits)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return words if dim == 1 else words.t()


def _awq_order(integers: Tensor) -> Tensor:
    return integers.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)


def quantization_config(form: dict[str, Any], *, head: bool) -> dict[str, Any]:
    if "quant_method" in form:
        return form | ({"lm_head": True} if head else {})
    weights = {key: value for key, value in form.items() if key not in ("format", "activations")} | {"type": "int"}
    return {
        "quant_method": "compressed-tensors",
        "format": form.get("format", "pack-quantized"),
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": form.get("activations")},
        },
        "ignore": [] if head else ["lm_head"],
    }
