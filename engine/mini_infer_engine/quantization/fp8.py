"""Stores FP8 weights (float8 e4m3fn, Micikevicius et al. 2022, arXiv 2209.05433) with tensor, channel or block scales.

Loading brings every scheme into one form: a scale for each row and each block of columns, [out_features, blocks of
columns] fp32, with a single block if a scale covers the whole row. On a GPU the weight is then packed for the kernels
(`layers.packed`).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.quantization.schemes import Fp8Scheme
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.layers.grouped import keep_dequantized, keep_grouped
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.packed import by_group, multiplies_fp8, pack_bytes
from mini_infer_engine.layers.placement import FP8, Part, Placement


def _bytes_in(order: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Returns FP8 weights with their rows in an order. torch has few operators for FP8 itself."""
    return order(weight.view(torch.uint8)).view(FP8)


class Fp8Method:
    """Implements `layers.linear.LinearMethod` for FP8. Adds `weight_scale` [out_features, column blocks] fp32 to a
    layer.
    """

    def __init__(self, scheme: Fp8Scheme) -> None:
        self.scheme = scheme
        self.dtype = torch.get_default_dtype()
        """The model's dtype: the default dtype at the time of construction."""

    def column_block(self, layer: Linear) -> int:
        """Returns the number of columns that share a scale."""
        return self.scheme.block[1] if self.scheme.strategy == "block" else layer.in_features

    def create_weights(self, layer: Linear) -> None:
        """Registers FP8 weights and their scales. Raises ValueError if a rank's columns cut through blocks."""
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features, dtype=FP8), requires_grad=False)
        block = self.column_block(layer)
        if layer.columns is not None and self.scheme.strategy == "block":
            (begin, end), *_ = layer.columns.ranges
            if begin % block or (end % block and end != layer.columns.total):
                raise ValueError(f"a rank's columns {begin} to {end} cut through blocks of {block}")
        blocks = -(-layer.in_features // block)
        scale = torch.empty(layer.out_features, blocks, dtype=torch.float32)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Maps the checkpoint's weight and scale to these rows of the layer."""
        scale, part = layer.weight_scale[rows], layer.part(rows)
        whole = None if part is None else part.whole_shape((rows.stop - rows.start, layer.in_features))
        count, columns = whole or (rows.stop - rows.start, layer.in_features)
        if self.scheme.strategy == "tensor":
            shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
        elif self.scheme.strategy == "channel":
            shapes = ((count,), (count, 1))
        else:
            shapes = ((-(-count // self.scheme.block[0]), -(-columns // self.scheme.block[1])),)
        order = layer.row_order(rows)
        by_row = partial(self._by_row, count, part)
        return {
            f"{path}.weight": Placement(layer.weight[rows], expand=order and partial(_bytes_in, order), part=part),
            f"{path}.{self.scheme.scale_name}": Placement(
                scale, shapes, by_row if order is None else lambda stored: order(by_row(stored))
            ),
        }

    def _by_row(self, rows: int, part: Part | None, scale: Tensor) -> Tensor:
        """Expands the checkpoint's scale to one for each row and column block, and cuts out this rank's part.

        `rows` is the number of rows of the whole tensor, of which a rank may store only `part`.
        """
        if self.scheme.strategy != "block":
            wide = scale.reshape(-1, 1).expand(rows, 1)
        else:
            wide = scale.repeat_interleave(self.scheme.block[0], dim=0)[:rows]
            if part is not None and part.dim == 1:
                block = self.scheme.block[1]
                return torch.cat([wide[:, begin // block : -(-end // block)] for begin, end in part.shard.ranges], 1)
        return wide if part is None or part.dim == 1 else part.of(wide)

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Packs the weight on a GPU with FP8 support; elsewhere dequantises it."""
        scale = by_group(layer.weight_scale, self.column_block(layer), layer.in_features)
        on_gpu = multiplies_fp8(layer.weight.device)
        if on_gpu and scale is not None:
            pack_bytes(layer, layer.weight, scale)
        elif on_gpu:
            keep_grouped(layer, self.grouped(layer))
        else:
            keep_dequantized(layer, self.dequantized(layer, self.dtype))

    def grouped(self, layer: Linear) -> GroupedWeight:
        """Returns the loaded weight in the form that kernels read."""
        columns, block = layer.in_features, self.column_block(layer)
        return GroupedWeight("fp8", layer.weight, layer.weight_scale, columns, block if block < columns else 0)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Multiplies with the dequantised weight, which is computed anew at each call."""
        return functional.linear(x, self.dequantized(layer, x.dtype), layer.bias)

    def dequantized(self, layer: Linear, dtype: torch.dtype) -> Tensor:
        """Returns the weight [out_features, in_features] in another dtype."""
        wide = layer.weight_scale.repeat_interleave(self.column_block(layer), dim=1)[:, : layer.in_features]
        return (layer.weight.float() * wide).to(dtype)
