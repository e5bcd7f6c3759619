"""FP8 weights (float8 e4m3fn, Micikevicius et al. 2022, arXiv 2209.05433) with scales by tensor, channel or block.

In memory every scheme is one: a scale for each row and each block of columns, [out_features, blocks of columns] fp32,
with one block where a scale is of the whole row. Activations stay in the model's dtype (W8A16).
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.quantization import Fp8Scheme
from mini_infer_engine.layers.linear import UNQUANTIZED, Linear
from mini_infer_engine.layers.placement import FP8, Placement


class Fp8Method:
    """See `layers.linear.LinearMethod`. Adds `weight_scale` [out_features, column blocks] fp32 to a layer."""

    def __init__(self, scheme: Fp8Scheme) -> None:
        self.scheme = scheme
        self.dtype = torch.get_default_dtype()
        """The model's, under which it is made."""

    def column_block(self, layer: Linear) -> int:
        """Columns that share a scale."""
        return self.scheme.block[1] if self.scheme.strategy == "block" else layer.in_features

    def create_weights(self, layer: Linear) -> None:
        """See `LinearMethod`."""
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features, dtype=FP8), requires_grad=False)
        blocks = -(-layer.in_features // self.column_block(layer))
        scale = torch.empty(layer.out_features, blocks, dtype=torch.float32)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """See `LinearMethod`."""
        scale = layer.weight_scale[rows]
        count, blocks = scale.shape
        if self.scheme.strategy == "tensor":
            shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
        elif self.scheme.strategy == "channel":
            shapes = ((count,), (count, 1))
        else:
            shapes = ((-(-count // self.scheme.block[0]), blocks),)
        return {
            f"{path}.weight": Placement(layer.weight[rows]),
            f"{path}.{self.scheme.scale_name}": Placement(scale, shapes, partial(self._by_row, count)),
        }

    def _by_row(self, rows: int, scale: Tensor) -> Tensor:
        """A scale as the checkpoint has it, for each row."""
        if self.scheme.strategy == "block":
            return scale.repeat_interleave(self.scheme.block[0], dim=0)[:rows]
        return scale.reshape(-1, 1).expand(rows, 1)

    def process_weights_after_loading(self, layer: Linear) -> None:
        """On a CPU, where FP8 is a form of storage alone, go on with the weights that it stands for."""
        if layer.weight.device.type == "cpu":
            weight = self.dequantized(layer, self.dtype)
            layer.method = UNQUANTIZED
            layer.weight = nn.Parameter(weight, requires_grad=False)
            layer.finish_loading()

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """See `LinearMethod`: over the weight that it stands for, made anew at each call."""
        return functional.linear(x, self.dequantized(layer, x.dtype), layer.bias)

    def dequantized(self, layer: Linear, dtype: torch.dtype) -> Tensor:
        """The weight in another dtype, [out_features, in_features]."""
        wide = layer.weight_scale.repeat_interleave(self.column_block(layer), dim=1)[:, : layer.in_features]
        return (layer.weight.float() * wide).to(dtype)
