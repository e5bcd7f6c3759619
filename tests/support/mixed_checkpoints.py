"""Checkpoints whose layers have different schemes, as their makers write them, and what they stand for.

After llm-compressor's guide to non-uniform quantisation (several `config_groups`, format "mixed-precision"),
GPTQModel's `dynamic` and modelopt's MIXED_PRECISION.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import fp4_checkpoints, fp8_checkpoints, integer_checkpoints


@dataclass(frozen=True)
class Group:
    """One of `config_groups`."""

    form: str
    """A format of one of the other modules; "": weights are not quantised."""
    targets: tuple[str, ...]
    ends: tuple[str, ...]
    """Of the names of the layers that the targets mean."""


def quantize_folder(
    folder: Path, groups: Iterable[Group], *, ignore: Iterable[str] = ("lm_head",), **more: Any
) -> dict[str, Tensor]:
    """Rewrite a folder's layers, each as the first group says that means it; returns all weights dequantised, by name.

    `more` goes into quantization_config.
    """
    groups = tuple(groups)
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {f"group_{number}": _group(group) for number, group in enumerate(groups)},
        "ignore": list(ignore),
    }

    def stored(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        group = next((group for group in groups if layer.endswith(group.ends)), None)
        return None if group is None or not group.form else _stored(weight, group.form)

    return _rewritten(folder, config | more, stored)


def quantize_gptq_folder(
    folder: Path, dynamic: dict[str, Any], form_of: Callable[[str], dict[str, Any] | None]
) -> dict[str, Tensor]:
    """Rewrite a folder's layers as GPTQ with 4 bits, changed by `form_of`; None: the layer is left as it is."""
    form = integer_checkpoints.FORMATS["gptq"]

    def stored(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        changes = form_of(layer)
        return None if changes is None else integer_checkpoints.quantized(weight, form | changes, 0)

    return _rewritten(folder, form | {"dynamic": dynamic}, stored)


def quantize_modelopt_folder(folder: Path, form_of: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Rewrite a folder's layers as NVIDIA's modelopt does with several formats: NVFP4 or FP8; None: as they are."""
    layers: dict[str, Any] = {}

    def stored(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        form = form_of(layer)
        if form is None:
            return None
        layers[layer] = {"quant_algo": form} | ({"group_size": 16} if form == "NVFP4" else {})
        if form == "NVFP4":
            return fp4_checkpoints.quantized(weight, "modelopt")
        values, scale, wide = fp8_checkpoints.quantized(weight, "compressed-tensor")
        parts = {"weight": values, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.1)}
        return parts, values.float() * wide

    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}
    return _rewritten(folder, config | {"quantized_layers": layers}, stored)


def _rewritten(
    folder: Path,
    config: dict[str, Any],
    stored: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None],
) -> dict[str, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    written, exact = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        layer = key.removesuffix(".weight")
        if weight.dim() != 2 or layer == key or (made := stored(layer, weight)) is None:
            continue
        del written[key]
        parts, exact[key] = made
        written |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(written, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return exact


def _stored(weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    if form in fp8_checkpoints.FORMATS:
        values, scale, wide = fp8_checkpoints.quantized(weight, form)
        return {"weight": values, "weight_scale": scale}, values.float() * wide
    if form in fp4_checkpoints.FORMATS:
        return fp4_checkpoints.quantized(weight, form)
    return integer_checkpoints.quantized(weight, integer_checkpoints.FORMATS[form], 0)


def _group(group: Group) -> dict[str, Any]:
    if not group.form:
        activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        return {"targets": list(group.targets), "weights": None, "input_activations": activations, "format": None}
    if group.form in fp8_checkpoints.FORMATS:
        config = fp8_checkpoints.quantization_config(group.form)
    elif group.form in fp4_checkpoints.FORMATS:
        config = fp4_checkpoints.quantization_config(group.form)
    else:
        config = integer_checkpoints.quantization_config(integer_checkpoints.FORMATS[group.form], head=False)
    return config["config_groups"]["group_0"] | {"targets": list(group.targets), "format": config["format"]}
