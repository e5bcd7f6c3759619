"""Writes checkpoints by compressed-tensors, whose import takes seconds: only a running test imports this file."""

from pathlib import Path
from typing import Any

import torch
from compressed_tensors import ModelCompressor
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
from torch import Tensor


def scheme_of(scheme: str | dict[str, Any]) -> QuantizationScheme:
    """Returns a preset by its name, or a scheme of weights alone by its arguments."""
    if isinstance(scheme, str):
        return preset_name_to_scheme(scheme, ["Linear"])
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**scheme))


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
