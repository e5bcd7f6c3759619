"""Rounds linear layers after loading, for `--quantization`.

int8 (W8A16): symmetric, with a scale for each row. w8a8-int8: the same weights, smoothed by `runtime.calibration`, with
activations in int8 and a scale for each token (on a GPU for more than 64 rows). fp8 (e4m3): a scale for each row; W8A16
for few rows, W8A8 for many. int4 (W4A16): a scale and a zero point for each row and 128 columns, rounded to the nearest
or by `runtime.calibration`. Experts and the head are always rounded to the nearest, and W8A16. Norms and routers stay
in the model's dtype, and so do the head and embeddings unless the caller requests otherwise. On a GPU a layer is packed
for the kernels. On a CPU plain torch widens a weight at each product; FP8 is dequantised there, as on GPUs without FP8.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.communication.collectives import Collectives
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, packed_pairs, stacked
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP
from mini_infer_engine.layers.linear import UNQUANTIZED, Linear
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.packed import multiplies_fp8, pack_bytes, pack_nibbles
from mini_infer_engine.layers.placement import FP8, Placement
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.quantization.experts import RoundedExperts
from mini_infer_engine.quantization.row_maxima import OverRanks, as_here, over_ranks_of, row_maxima

Quantization = Literal["int8", "fp8", "int4", "w8a8-int8"]
_LARGEST_INT8, _LARGEST_INT4, _LARGEST_FP8 = 127, 15, 448.0
_LEAST_SCALE = 2.0**-24
"""The smallest scale, for weights that are all zero: any but zero would do. It is the smallest positive fp16 number."""


class RoundToNearestMethod:
    """Implements `layers.linear.LinearMethod` by rounding to the nearest.

    After `process_weights_after_loading` a layer has `integers` and scales.
    """

    def __init__(self, kind: Quantization) -> None:
        self.kind: Quantization = kind
        self.waits = False
        """True if `process_weights_after_loading` leaves weights unchanged, because calibration rounds them later."""
        self.over_ranks: OverRanks = as_here

    def create_weights(self, layer: Linear) -> None:
        """Registers the weight in the model's dtype."""
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features), requires_grad=False)

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Maps the checkpoint's weight to these rows of the layer."""
        return {f"{path}.weight": Placement(layer.weight[rows], expand=layer.row_order(rows), part=layer.part(rows))}

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Rounds the weight, once, and frees it."""
        if not layer.weight.numel() or self.waits:
            return
        if self.kind == "fp8":
            self._to_fp8(layer)
        elif self.kind == "int4":
            self.keep_groups(layer, *rounded_groups(layer.weight, GROUP))
        else:
            self.keep_rows(layer, *rounded_rows(layer.weight, self.over_ranks(row_maxima(layer.weight))))

    def keep_rows(self, layer: Linear, integers: Tensor, scale: Tensor) -> None:
        """Replaces the weight by what `rounded_rows` has made of it, or of a smoothed one."""
        if layer.weight.device.type != "cpu":
            pack_bytes(layer, integers, scale, int8_activations=self.kind == "w8a8-int8")
        else:
            _keep(layer, integers, scale)

    def keep_groups(self, layer: Linear, integers: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Replaces the weight by what `rounded_groups` or a calibrated rounding has made of it."""
        if layer.weight.device.type != "cpu":
            pack_nibbles(layer, integers, scale, zero)
        else:
            layer.weight_minimum = nn.Parameter(-zero * scale, requires_grad=False)
            _keep(layer, packed_nibbles(integers), scale)

    def _to_fp8(self, layer: Linear) -> None:
        values, scale = rounded_to_fp8(layer.weight, self.over_ranks(row_maxima(layer.weight)))
        if multiplies_fp8(layer.weight.device):
            pack_bytes(layer, values, scale)
            return
        weight = (values.float() * scale).to(layer.weight.dtype)
        layer.method = UNQUANTIZED
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.finish_loading()

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Multiplies in plain torch. A row's scale is applied to the product, groups' scales to the weight."""
        if layer.weight.numel():
            return functional.linear(x, layer.weight, layer.bias)
        if self.kind == "int8":
            out = functional.linear(x, layer.integers.to(x.dtype)) * layer.weight_scale.t().to(x.dtype)
            return out if layer.bias is None else out.add_(layer.bias)
        if self.kind == "w8a8-int8":
            values, x_scale = rounded_rows(x)
            sums = functional.linear(values.float(), layer.integers.float())
            wide = sums.mul_(x_scale).mul_(layer.weight_scale.t())
            return (wide if layer.bias is None else wide.add_(layer.bias)).to(x.dtype)
        integers = unpacked_nibbles(layer.integers, layer.in_features)
        scale, minimum = (
            each.repeat_interleave(GROUP, dim=1)[:, : layer.in_features]
            for each in (layer.weight_scale, layer.weight_minimum)
        )
        return functional.linear(x, torch.addcmul(minimum, integers, scale).to(x.dtype), layer.bias)


def _keep(layer: Linear, integers: Tensor, scale: Tensor) -> None:
    layer.integers = nn.Parameter(integers, requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def quantize_on_load(
    model: DecoderModel, kind: Quantization, *, rounds_head: bool = False, rounds_embeddings: bool = False
) -> None:
    """Has all linear layers but routers, and all experts, rounded after loading. Call it before anything is loaded.

    `rounds_head` includes the head. `rounds_embeddings` includes the embeddings, which are rounded to int8 whatever the
    kind.
    """
    mixtures = [module for module in model.modules() if isinstance(module, SparseMoE)]
    head_kind: Quantization = "int8" if kind == "w8a8-int8" else kind  # logits are the most sensitive to what they read
    routers = {layer for moe in mixtures for layer in moe.unquantized_layers}
    for moe in mixtures:
        moe.stored = RoundedExperts(partial(_grouped, kind))
    for path, module in model.named_modules():
        if isinstance(module, Linear) and (rounds_head or path != "lm_head") and module not in routers:
            module.use(RoundToNearestMethod(head_kind if path == "lm_head" else kind))
    if rounds_embeddings and model.model.embed_tokens is not None:
        model.model.embed_tokens.rounding = rounded_rows
    if rounds_head and model.lm_head is None:
        model.tied_head_method = RoundToNearestMethod(head_kind)


def round_alike(model: DecoderModel, collectives: Collectives) -> None:
    """Has layers and experts whose columns are sharded over ranks rounded with scales of whole rows, as a single rank
    would.
    """
    over_ranks = over_ranks_of(collectives)
    for module in model.modules():
        if isinstance(module, Linear) and module.is_summed and isinstance(module.method, RoundToNearestMethod):
            module.method.over_ranks = over_ranks
        is_shared_out = isinstance(module, SparseMoE) and module.share.count < module.share.total
        if is_shared_out and isinstance(module.stored, RoundedExperts):
            module.stored.over_ranks = over_ranks


def _grouped(kind: Quantization, weights: Tensor, over_ranks: OverRanks) -> GroupedWeight:
    """Rounds weights [experts, rows, columns] to the nearest."""
    columns = weights.shape[2]
    if kind == "int4":
        groups = (rounded_groups(one, GROUP) for one in weights)
        return stacked(
            [
                GroupedWeight("int4", packed_pairs(integers), scale.half(), columns, GROUP, zero.to(torch.uint8))
                for integers, scale, zero in groups
            ]
        )
    maxima = torch.stack([row_maxima(one) for one in weights])
    maxima = over_ranks(maxima.flatten(0, 1)).view_as(maxima)  # of all experts at once: few messages
    both = zip(weights, maxima, strict=True)
    if kind == "fp8":
        return stacked([GroupedWeight("fp8", *rounded_to_fp8(*one), columns, 0) for one in both])
    return stacked([GroupedWeight("int8", *rounded_rows(*one), columns, 0) for one in both])


def rounded_rows(weight: Tensor, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns int8 integers in [-127, 127] and scales [rows, 1] fp32: weight = integer * scale.

    `maxima` is computed by `row_maxima` if it is None.
    """
    scale = ((row_maxima(weight) if maxima is None else maxima) / _LARGEST_INT8).clamp_(min=_LEAST_SCALE)
    return (weight.float() / scale).round_().to(torch.int8), scale


def rounded_to_fp8(weight: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e4m3 values and scales [rows, 1] fp32: weight = value * scale. `row_maxima` computes `maxima`."""
    scale = (maxima / _LARGEST_FP8).clamp_(min=_LEAST_SCALE)
    return (weight.float() / scale).to(FP8), scale


def rounded_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns uint8 integers in [0, 15], fp16 scales as fp32, and integer zero points [rows, groups] in [0, 15].

    weight = (integer - zero point) * scale, for groups of columns.
    """
    rows, columns = weight.shape
    groups = functional.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    minimum, maximum = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    scale = ((maximum - minimum) / _LARGEST_INT4).clamp_(min=_LEAST_SCALE).half().float()
    zero = (-minimum / scale).round_().clamp_(0, _LARGEST_INT4)
    integers = (groups / scale.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, _LARGEST_INT4)
    return integers.to(torch.uint8).view(rows, -1)[:, :columns].contiguous(), scale, zero


def packed_nibbles(integers: Tensor) -> Tensor:
    """Packs two columns into a byte, uint8 [rows, columns / 2], the first in the low half. An odd column is alone."""
    nibbles = functional.pad(integers, (0, integers.shape[1] % 2))
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpacked_nibbles(packed: Tensor, columns: int) -> Tensor:
    """Returns the integers that `packed_nibbles` packed, uint8 [rows, columns]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :columns]
