"""Stores layers whose weights stay quantised in the checkpoint's order of columns: groups that `packed` has no form
for.

Does not know any checkpoint: the readers of checkpoints pass a `GroupedWeight`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, Kind, dequantized_groups
from mini_infer_engine.layers.linear import UNQUANTIZED, Linear
from mini_infer_engine.layers.packed import multiplies_fp8
from mini_infer_engine.layers.placement import Placement

_CHUNK = 1 << 26
"""Weights that are dequantised at once by plain torch."""


class GroupedMethod:
    """Implements `layers.linear.LinearMethod` for a layer that has been loaded; nothing more can be loaded into it."""

    def __init__(self, kind: Kind, group: int) -> None:
        self.kind, self.group = kind, group

    def create_weights(self, layer: Linear) -> None:
        """Does nothing: `keep_grouped` has registered the parameters."""

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Returns no placements: the checkpoint's tensors are not those that are stored."""
        return {}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Does nothing: the weight is in its final form."""

    def weight(self, layer: Linear) -> GroupedWeight:
        """Returns the weight that kernels multiply with."""
        zeros, factors, order = (getattr(layer, f"weight_{part}", None) for part in ("zeros", "factors", "order"))
        k = layer.in_features if order is None else len(order)
        values, scales = layer.integers, layer.weight_scale
        return GroupedWeight(self.kind, values, scales, k, self.group, zeros, factors, order, layer.in_features)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Multiplies with the dequantised weight, which is computed anew at each call, some rows at a time."""
        weight, bias = self.weight(layer), layer.bias
        at_once = max(1, _CHUNK // weight.k)
        products = []
        for begin in range(0, layer.out_features, at_once):
            rows = slice(begin, begin + at_once)
            wide = dequantized_groups(weight.at(rows)).to(x.dtype)
            products.append(functional.linear(x, wide, None if bias is None else bias[rows]))
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def keep_grouped(layer: Linear, weight: GroupedWeight) -> None:
    """Replaces the loaded tensors by a weight that kernels read. Its tensors are parameters, so that their bytes are
    counted.
    """
    release_weights(layer)
    kept = {"integers": weight.values, "weight_scale": weight.scales}
    optional = {"weight_zeros": weight.zeros, "weight_factors": weight.factors, "weight_order": weight.order}
    for name, tensor in kept.items():
        layer.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=False))
    for name, part in optional.items():
        if part is not None:
            layer.register_parameter(name, nn.Parameter(part.contiguous(), requires_grad=False))
    layer.method = GroupedMethod(weight.kind, weight.group)


def keep_dequantized(layer: Linear, weight: Tensor) -> None:
    """Replaces the loaded tensors by the weight [out_features, in_features]; the layer becomes an unquantised one."""
    release_weights(layer)
    layer.method = UNQUANTIZED
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.finish_loading()


def release_weights(layer: Linear) -> None:
    """Deletes all parameters but the bias."""
    for name in [name for name in layer._parameters if name != "bias"]:
        delattr(layer, name)


def multiplies_groups(device: torch.device, kind: Kind) -> bool:
    """True if kernels read weights of this kind on the device: FP8 where the GPU has it, others on any GPU."""
    return multiplies_fp8(device) if kind == "fp8" else device.type == "cuda"


def multiplies_mx_in_registers(device: torch.device) -> bool:
    """True if the kernel of `moe.mx_experts` runs on the device: it needs Hopper's products with registers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
