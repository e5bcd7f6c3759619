"""`--quantization`: linear layers rounded to integers when they are loaded, without calibration (round to nearest).

int8 (W8A16): symmetric, one scale a row. int4 (W4A16): two integers a byte, a scale and a minimum for each row and 128
columns. Activations, embeddings, norms and the head stay in the model's dtype. What is computed here is the reference
that kernels will be tested against: plain torch, which widens a weight at each product.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.placement import Placement

Quantization = Literal["int8", "int4"]
GROUP_COLUMNS = 128
_LARGEST_INT8, _LARGEST_INT4 = 127, 15
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Of weights that are all equal: any would do, but zero."""


class RoundToNearestMethod:
    """See `layers.linear.LinearMethod`. From `process_weights_after_loading` on a layer has `integers` and scales."""

    def __init__(self, kind: Quantization) -> None:
        self.kind: Quantization = kind

    def create_weights(self, layer: Linear) -> None:
        """See `LinearMethod`."""
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features), requires_grad=False)

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """See `LinearMethod`."""
        return {f"{path}.weight": Placement(layer.weight[rows], part=layer.part(rows))}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Round, once, and give the weight up."""
        if not layer.weight.numel():
            return
        if self.kind == "int8":
            integers, scale = rounded_rows(layer.weight)
        else:
            nibbles, scale, minimum = rounded_groups(layer.weight, GROUP_COLUMNS)
            integers = packed_nibbles(nibbles)
            layer.weight_minimum = nn.Parameter(minimum, requires_grad=False)
        layer.integers = nn.Parameter(integers, requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """See `LinearMethod`. A row's one scale is multiplied with the product, groups' scales with the weight."""
        if self.kind == "int8":
            out = functional.linear(x, layer.integers.to(x.dtype)) * layer.weight_scale.t().to(x.dtype)
            return out if layer.bias is None else out.add_(layer.bias)
        integers = unpacked_nibbles(layer.integers, layer.in_features)
        scale, minimum = (
            each.repeat_interleave(GROUP_COLUMNS, dim=1)[:, : layer.in_features]
            for each in (layer.weight_scale, layer.weight_minimum)
        )
        return functional.linear(x, torch.addcmul(minimum, integers, scale).to(x.dtype), layer.bias)


def quantize_on_load(model: nn.Module, kind: Quantization) -> None:
    """Have all linear layers but the head rounded once they are loaded; before anything is loaded.

    Raises:
        ModelError: the model has experts, whose weights are no linear layers.

    """
    for path, module in model.named_modules():
        if isinstance(module, SparseMoE):
            raise ModelError(f"quantization = {kind!r}: experts are not quantised; leave it out for this model.")
        if isinstance(module, Linear) and path != "lm_head":
            module.use(RoundToNearestMethod(kind))


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 integers in [-127, 127] and scales [rows, 1] fp32: weight = integer * scale."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / _LARGEST_INT8).clamp_(min=_LEAST_SCALE)
    return (wide / scale).round_().to(torch.int8), scale


def rounded_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 integers in [0, 15], scales and minima [rows, groups] fp32: weight = minimum + integer * scale."""
    rows, columns = weight.shape
    last = weight[:, -1:].expand(rows, -columns % group)  # so that padding changes no group's minimum and maximum
    groups = torch.cat((weight, last), dim=1).float().view(rows, -1, group)
    minimum, maximum = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((maximum - minimum) / _LARGEST_INT4).clamp_(min=_LEAST_SCALE)
    integers = ((groups - minimum.unsqueeze(2)) / scale.unsqueeze(2)).round_().to(torch.uint8)
    return integers.view(rows, -1)[:, :columns].contiguous(), scale, minimum


def packed_nibbles(integers: Tensor) -> Tensor:
    """Two columns a byte, uint8 [rows, columns / 2], the first in the low half; an odd column is alone."""
    nibbles = functional.pad(integers, (0, integers.shape[1] % 2))
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpacked_nibbles(packed: Tensor, columns: int) -> Tensor:
    """The integers of `packed_nibbles`, uint8 [rows, columns]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :columns]
