"""Checkpoints with 4-bit floats: NVFP4 (NVIDIA) and MXFP4 (OCP Microscaling Formats 1.0), as W4A16 on every GPU.

Weights stay packed on a GPU, whose kernels widen them; activations keep the model's dtype, also on GPUs that have FP4
products. On a CPU weights are dequantised when they are loaded.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.config.quantization.fp4 import Fp4Scheme
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, dequantized_groups
from mini_infer_engine.layers.grouped import keep_dequantized, keep_grouped, multiplies_groups
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.packed import multiplies_fp8
from mini_infer_engine.layers.placement import FP8, Part, Placement

_NAMES = {
    "nvfp4-pack-quantized": ("weight_packed", "weight_global_scale"),
    "mxfp4-pack-quantized": ("weight_packed", ""),
    "modelopt": ("weight", "weight_scale_2"),
}
"""Checkpoint names of the weights and of the scale of the whole tensor, by format; "" if the format has no such scale.
"""


class Fp4Method:
    """Implements `layers.linear.LinearMethod` for 4-bit floats.

    Adds `weight_scale` [out_features, groups] and with NVFP4 `weight_factors` [out_features] fp32 to a layer, whose
    `weight` is [out_features, in_features / 2] bytes.
    """

    def __init__(self, scheme: Fp4Scheme) -> None:
        self.scheme = scheme
        self.dtype = torch.get_default_dtype()
        """The model's dtype: the default dtype at the time of construction."""
        self._weight_name, self._factor_name = _NAMES[scheme.form]

    def create_weights(self, layer: Linear) -> None:
        """Registers packed weights, group scales and, with NVFP4, factors. Raises ValueError if groups do not divide
        the columns.
        """
        group, rows, columns = self.scheme.group_size, layer.out_features, layer.in_features
        ranges = ((0, columns),) if layer.columns is None else layer.columns.ranges
        if any(begin % group or end % group for begin, end in ranges):
            raise ValueError(f"{columns} columns are not made of groups of {group}")
        scale_dtype = FP8 if self._factor_name else torch.uint8
        tensors = {
            "weight": torch.empty(rows, columns // 2, dtype=torch.uint8),
            "weight_scale": torch.empty(rows, columns // group, dtype=scale_dtype),
        }
        if self._factor_name:
            tensors["weight_factors"] = torch.empty(rows, dtype=torch.float32)
        for name, tensor in tensors.items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Maps the checkpoint's packed weights, group scales and tensor scale to these rows of the layer."""
        part, order = layer.part(rows), layer.row_order(rows)
        of_scales = _of_columns(part, self.scheme.group_size)
        placements = {
            f"{path}.{self._weight_name}": Placement(layer.weight[rows], expand=order, part=_of_columns(part, 2)),
            f"{path}.weight_scale": Placement(layer.weight_scale[rows], expand=order, part=of_scales),
        }
        if self._factor_name:
            factors = layer.weight_factors[rows]
            placements[f"{path}.{self._factor_name}"] = Placement(
                factors, ((), (1,), (1, 1)), partial(self._factors, factors.shape)
            )
        return placements

    def _factors(self, shape: torch.Size, scale: Tensor) -> Tensor:
        """Returns the tensor's scale as a factor for each row: compressed-tensors stores its reciprocal."""
        factor = scale.float().reshape(1)
        return (factor if self.scheme.form == "modelopt" else factor.reciprocal()).expand(shape)

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Keeps the weight packed on a GPU; elsewhere dequantises it, and the layer becomes an unquantised one."""
        weight = self.grouped(layer)
        if multiplies_groups(layer.weight.device, weight.kind):
            keep_grouped(layer, weight)
        else:
            keep_dequantized(layer, dequantized_groups(weight).to(self.dtype))

    def grouped(self, layer: Linear) -> GroupedWeight:
        """Returns the loaded weight in the form that kernels read."""
        scales: Tensor = layer.weight_scale
        device = layer.weight.device
        if device.type == "cuda" and scales.dtype == FP8 and not multiplies_fp8(device):
            scales = scales.half()  # exact
        factors = getattr(layer, "weight_factors", None)
        return GroupedWeight("fp4", layer.weight, scales, layer.in_features, self.scheme.group_size, factors=factors)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Multiplies with the dequantised weight, which is computed anew at each call."""
        return functional.linear(x, dequantized_groups(self.grouped(layer)).to(x.dtype), layer.bias)


def _of_columns(part: Part | None, together: int) -> Part | None:
    """Converts a part of the weight into that of a tensor with one element for every `together` columns."""
    if part is None or part.dim == 0:
        return part
    shard = part.shard
    ranges = tuple((begin // together, end // together) for begin, end in shard.ranges)
    return Part(1, Shard(shard.total // together, ranges))
