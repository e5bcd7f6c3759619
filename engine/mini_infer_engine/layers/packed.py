"""The form in which kernels multiply with quantised weights, which methods bring a layer into on a GPU.

Does not know any checkpoint: those that read or round weights do, and hand over values, scales and zero points.
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
    """See `layers.linear.LinearMethod`: of a layer that has been loaded and packed; nothing is placed in it."""

    def __init__(self, *, int8_activations: bool = False) -> None:
        self._int8_activations = int8_activations

    def create_weights(self, layer: Linear) -> None:
        """Nothing: `pack_bytes` and `pack_nibbles` have."""

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """None: what a checkpoint has is not what is kept."""
        return {}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Nothing is left to do."""

    def weight(self, layer: Linear) -> QuantizedWeight:
        """What kernels multiply with."""
        return QuantizedWeight(layer.integers, layer.weight_scale, layer.in_features, self._int8_activations)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """See `LinearMethod`: over the weight that it stands for, made anew at each call."""
        return functional.linear(x, dequantized(self.weight(layer)).to(x.dtype), layer.bias)


PACKED = PackedMethod()
PACKED_W8A8 = PackedMethod(int8_activations=True)


def pack_bytes(layer: Linear, values: Tensor, scales: Tensor, *, int8_activations: bool = False) -> None:
    """From 8-bit values [N, K], int8 or FP8, and fp32 scales: [N, 1] of rows or [N, groups] of `GROUP` columns.

    `int8_activations`: see `QuantizedWeight`.
    """
    kept = scales.float().view(-1) if scales.shape[1] == 1 else scales.float().t()
    _keep(layer, interleaved(values), kept)
    if int8_activations:
        layer.method = PACKED_W8A8


def pack_nibbles(layer: Linear, integers: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """From integers in [0, 15] [N, K], and scales and integer zero points [N, groups] of `GROUP` columns."""
    _keep(layer, packed_nibbles(integers.to(torch.uint8)), packed_parameters(scales, zeros))


def multiplies_fp8(device: torch.device) -> bool:
    """Whether kernels can read FP8 weights there: GPUs of compute capability 8.9 (L4) and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def by_group(parameters: Tensor, column_block: int, columns: int) -> Tensor | None:
    """Scales or zero points [N, blocks of columns] of groups of `GROUP`; None: kernels have no such groups.

    One block stays one.
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
