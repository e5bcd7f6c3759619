"""Stores integer weights with small groups on a CPU in the form of torch's int4 product, which widens in registers.

torch's operator `_weight_int4pack_mm_for_cpu` multiplies bf16 activations with 4-bit integers that have a scale and an
offset for each row and group of columns. An 8-bit weight is the sum of two such products, of its high and its low half.
Knows no checkpoint: the readers of checkpoints pass a `GroupedWeight`.
"""

import torch
from torch import Tensor, nn

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, dequantized_groups
from mini_infer_engine.layers.grouped import release_weights
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.placement import Placement

_GROUPS = (32, 64, 128, 256)
"""Columns that may share a scale in the operator."""
_ROWS = 16
"""Rows of a weight come in multiples of this."""
_INSTRUCTIONS = ("AVX2", "AVX512")
"""Instruction sets for which the operator has code; others run a reference, slower than products with bf16 copies."""
_MIDDLE = 8
"""The number that the operator subtracts from each integer."""
_HIGH = 16
"""The weight of an 8-bit integer's high half."""


class CpuNibblesMethod:
    """Implements `layers.linear.LinearMethod` for a layer that has been loaded; nothing more can be loaded into it."""

    def __init__(self, group: int) -> None:
        self.group = group

    def create_weights(self, layer: Linear) -> None:
        """Does nothing: `keep_nibbles` has registered the parameters."""

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Returns no placements: the checkpoint's tensors are not those that are stored."""
        return {}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Does nothing: the weight is in its final form."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias."""
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        x = x.contiguous()
        out: Tensor = product(x, layer.integers, self.group, layer.weight_scale)
        if (low := getattr(layer, "low_integers", None)) is not None:
            out += product(x, low, self.group, layer.low_scale)
        return out if layer.bias is None else out.add_(layer.bias)


def multiplies_nibbles(rows: int, group: int, dtype: torch.dtype) -> bool:
    """True if torch's operator multiplies with integer weights of this form on a CPU."""
    fits = dtype == torch.bfloat16 and group in _GROUPS and not rows % _ROWS
    return fits and torch.backends.cpu.get_cpu_capability() in _INSTRUCTIONS


def keep_nibbles(layer: Linear, weight: GroupedWeight) -> None:
    """Replaces the loaded tensors by the operator's. Its tensors are parameters, so that their bytes are counted."""
    release_weights(layer)
    integers, offsets = _parts(weight)
    scales = weight.scales.float()
    kept: dict[str, Tensor] = {}
    if weight.kind == "int4":
        kept["integers"], kept["weight_scale"] = _packed(integers), _pairs(scales, scales * _MIDDLE + offsets)
    else:
        high, low = (integers >> 4) + _MIDDLE, integers & 15
        kept["integers"], kept["weight_scale"] = _packed(high), _pairs(scales * _HIGH, offsets)
        kept["low_integers"], kept["low_scale"] = _packed(low), _pairs(scales, scales * _MIDDLE)
    for name, tensor in kept.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    layer.method = CpuNibblesMethod(weight.group)


def _parts(weight: GroupedWeight) -> tuple[Tensor, Tensor]:
    """Returns integers [rows, columns] int32 and offsets [rows, groups] fp32: integer * scale + offset."""
    plain = GroupedWeight(weight.kind, weight.values, torch.ones_like(weight.scales), weight.k, weight.group)
    integers = dequantized_groups(plain).int()
    if weight.zeros is None:
        return integers, torch.zeros_like(weight.scales, dtype=torch.float32)
    zeros = weight.zeros.float()
    return integers, zeros if weight.zeros.is_floating_point() else -zeros * weight.scales.float()


def _packed(integers: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.contiguous(), 1)
    return packed


def _pairs(scales: Tensor, offsets: Tensor) -> Tensor:
    """Returns [groups, rows, 2] bf16."""
    return torch.stack([scales.t(), offsets.t()], dim=-1).to(torch.bfloat16).contiguous()
