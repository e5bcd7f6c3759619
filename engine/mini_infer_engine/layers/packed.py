"""Packs quantised weights into the form that the GPU kernels multiply with.

Does not know any checkpoint: the readers of checkpoints and the rounding pass values, scales and zero points.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.kernels.gemm.quantized_weight import (
    GROUP,
    QuantizedWeight,
    dequantized,
    interleaved,
    packed_nibbles,
    packed_parameters,
)
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.placement import Placement


class PackedMethod:
    """Implements `layers.linear.LinearMethod` for a layer that has been loaded and packed; nothing more can be loaded
    into it.
    """

    def __init__(self, *, int8_activations: bool = False) -> None:
        self._int8_activations = int8_activations

    def create_weights(self, layer: Linear) -> None:
        """Does nothing: `pack_bytes` and `pack_nibbles` have registered the parameters."""

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Returns no placements: the checkpoint's tensors are not those that are stored."""
        return {}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Does nothing: the weight is in its final form."""

    def weight(self, layer: Linear) -> QuantizedWeight:
        """Returns the weight that kernels multiply with."""
        return QuantizedWeight(layer.integers, layer.weight_scale, layer.in_features, self._int8_activations)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Multiplies with the dequantised weight, which is computed anew at each call."""
        return functional.linear(x, dequantized(self.weight(layer)).to(x.dtype), layer.bias)


PACKED = PackedMethod()
PACKED_W8A8 = PackedMethod(int8_activations=True)


def pack_bytes(layer: Linear, values: Tensor, scales: Tensor, *, int8_activations: bool = False) -> None:
    """Packs 8-bit values [N, K], int8 or FP8, and fp32 scales: [N, 1] of rows or [N, groups] of `GROUP` columns.

    `QuantizedWeight` documents `int8_activations`.
    """
    kept = scales.float().view(-1) if scales.shape[1] == 1 else scales.float().t()
    _keep(layer, interleaved(values), kept)
    if int8_activations:
        layer.method = PACKED_W8A8


def pack_nibbles(layer: Linear, integers: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """Packs integers in [0, 15] [N, K], and scales and integer zero points [N, groups] of `GROUP` columns."""
    _keep(layer, packed_nibbles(integers.to(torch.uint8)), packed_parameters(scales, zeros))


def multiplies_fp8(device: torch.device) -> bool:
    """True if kernels can read FP8 weights on the device: GPUs of compute capability 8.9 (L4) and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def by_group(parameters: Tensor, column_block: int, columns: int) -> Tensor | None:
    """Expands scales or zero points [N, blocks of columns] to groups of `GROUP`, or returns None if blocks are no such
    groups.

    A single block for the whole row stays one.
    """
    if parameters.shape[1] == 1:
        return parameters
    if column_block % GROUP:
        return None
    groups = -(-columns // GROUP)
    return parameters.repeat_interleave(column_block // GROUP, dim=1)[:, :groups]


def _keep(layer: Linear, values: Tensor, scales: Tensor) -> None:
    layer.integers = nn.Parameter(values.contiguous(), requires_grad=False)
    layer.weight_scale = nn.Parameter(scales.contiguous(), requires_grad=False)
    if "weight" in layer._parameters:
        layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=values.device), requires_grad=False)
    layer.method = PACKED
