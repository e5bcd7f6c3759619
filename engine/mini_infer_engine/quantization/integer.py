"""Reads checkpoints with integer weights (GPTQ, AWQ, compressed-tensors), and packs them for a GPU's kernels once
loaded.

Two kinds of kernels read them. `layers.packed` has the faster form, for scales of rows and of groups of 128 columns.
`layers.grouped` takes groups of any size, columns that are not in the order of their groups (act-order; the groups of a
rank's columns have several sizes, and are split into smaller ones), and 8 bits with zero points. Other forms, and all
weights on a CPU, are dequantised, and the layer becomes an unquantised one. weight = (integer - zero point) * scale,
with one zero point and one scale for each row and group of columns (Frantar et al. 2022, arXiv 2210.17323; Lin et al.
2023, arXiv 2306.00978).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.quantization.integer import IntegerScheme
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, packed_pairs
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP
from mini_infer_engine.layers.grouped import keep_dequantized, keep_grouped, multiplies_groups
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.packed import by_group, pack_bytes, pack_nibbles
from mini_infer_engine.layers.placement import Part, Placement
from mini_infer_engine.quantization.integer_layout import WORD_BITS, TensorLayout, group_size, layouts

_HALF_PRECISION = 1e-3
"""Relative error up to which a scale may be rounded to fp16."""
_SMALL_GROUP = 32
"""Columns that share a scale if a checkpoint's groups are of several sizes: rows stay aligned to 16 bytes."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the 1st, 2nd, ... column in a word of AWQ's layout "gemm"."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A decoded weight: (integer - zero point) * scale."""

    integers: Tensor  # [rows, columns] int32
    scales: Tensor  # [rows, groups] fp32
    zeros: Tensor  # [rows, groups] int32
    groups: Tensor  # [columns] int64: each column's

    def dequantized(self) -> Tensor:
        """Returns the weight, [rows, columns] fp32."""
        weight: Tensor = (self.integers - self.zeros[:, self.groups]).float() * self.scales[:, self.groups]
        return weight


class IntegerCheckpointMethod:
    """Implements `layers.linear.LinearMethod`. Keeps the checkpoint's tensors until all of them are loaded."""

    def __init__(self, scheme: IntegerScheme) -> None:
        self.scheme = scheme
        self.dtype = torch.get_default_dtype()
        """The model's dtype: the default dtype at the time of construction."""

    def create_weights(self, layer: Linear) -> None:
        """Registers the checkpoint's tensors. Raises ValueError if the layer's sizes do not fit the scheme."""
        for rows in _parts(layer):
            for name, layout in layouts(self.scheme, layer, rows).items():
                tensor = torch.empty(layout.stored_shape(layer.part(rows)), dtype=layout.dtype)
                layer.register_parameter(_parameter(name, rows), nn.Parameter(tensor, requires_grad=False))
        if hasattr(layer, "weight"):
            del layer.weight

    def placements(self, layer: Linear, path: str, rows: slice) -> dict[str, Placement]:
        """Maps the checkpoint's tensors of these rows to the layer's parameters."""
        return {
            f"{path}.{name}": _placement(
                getattr(layer, _parameter(name, rows)), layout, layout.stored(layer.part(rows))
            )
            for name, layout in layouts(self.scheme, layer, rows).items()
        }

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Packs the weight on a GPU whose kernels know its form; else dequantises it, and the layer becomes an
        unquantised one.
        """
        parts = self._all_decoded(layer)
        for rows in _parts(layer):
            for name in layouts(self.scheme, layer, rows):
                delattr(layer, _parameter(name, rows))
        on_gpu = multiplies_groups(parts[0].scales.device, "int4")
        if on_gpu and self._pack(layer, parts):
            return
        if on_gpu and (weight := self._grouped(layer, parts)) is not None:
            keep_grouped(layer, weight)
            return
        keep_dequantized(layer, torch.cat([part.dequantized().to(self.dtype) for part in parts]))

    def grouped(self, layer: Linear) -> GroupedWeight | None:
        """Returns the loaded weight in the form that kernels read, or None if there is no such form."""
        return self._grouped(layer, self._all_decoded(layer))

    def _grouped(self, layer: Linear, parts: list[_Decoded]) -> GroupedWeight | None:
        columns, first = layer.in_features, parts[0].groups
        group = group_size(self.scheme, layer)
        group = group if group < columns else 0
        in_order = torch.arange(columns, device=first.device) // (group or columns)
        order = None if torch.equal(first, in_order) else first.argsort(stable=True)
        same_order = all(torch.equal(part.groups, first) for part in parts)
        if not same_order:
            return None
        integers, scales, zeros = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("integers", "scales", "zeros")
        )
        if order is not None:
            if not torch.equal(first[order], in_order):  # groups of a rank's columns, which are of any size
                order, group, used = _split_groups(first)
                scales, zeros = scales[:, used], zeros[:, used]
            integers, order = integers[:, order.clamp(min=0)], order.int()
            columns = len(order)
        half = scales.half()
        scales = half if torch.equal(half.float(), scales) else scales
        if self.scheme.bits == 4:
            kept = zeros.to(torch.uint8)
            values = packed_pairs(integers)
            return GroupedWeight("int4", values, scales, columns, group, kept, None, order, layer.in_features)
        middle = 0 if self.scheme.form == "int-quantized" else 128
        signed = (zeros - middle).to(torch.int8)
        values, packed_zeros = (integers - middle).to(torch.int8), signed if signed.any() else None
        return GroupedWeight("int8", values, scales, columns, group, packed_zeros, None, order, layer.in_features)

    def _pack(self, layer: Linear, parts: list[_Decoded]) -> bool:
        """Packs the layer for the faster kernels. Returns False, with the layer unchanged, if they do not know its
        form.
        """
        group = group_size(self.scheme, layer) or layer.in_features
        in_order = torch.arange(layer.in_features, device=parts[0].groups.device) // group
        integers = torch.cat([part.integers for part in parts])
        scales = by_group(torch.cat([part.scales for part in parts]), group, layer.in_features)
        zeros = by_group(torch.cat([part.zeros for part in parts]), group, layer.in_features)
        if scales is None or zeros is None or not all(torch.equal(part.groups, in_order) for part in parts):
            return False
        if self.scheme.bits == 8:
            signed = integers - zeros[:, :1]
            if not bool((zeros == zeros[:1, :1]).all()) or int(signed.min()) < -128 or int(signed.max()) > 127:
                return False
            pack_bytes(layer, signed.to(torch.int8), scales, int8_activations=self.scheme.int8_activations)
            return True
        if bool(((scales.half().float() - scales).abs() > scales.abs() * _HALF_PRECISION).any()):
            return False
        groups = -(-layer.in_features // GROUP)
        pack_nibbles(layer, integers, scales.expand(-1, groups), zeros.expand(-1, groups))
        return True

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Multiplies with weights decoded anew at each call; used only before `process_weights_after_loading`."""
        weight = torch.cat([part.dequantized() for part in self._all_decoded(layer)])
        return functional.linear(x, weight.to(x.dtype), layer.bias)

    def _all_decoded(self, layer: Linear) -> list[_Decoded]:
        """Decodes the layer's parts, and adds zeros for padding rows, which a rank's part of a head may have."""
        parts = [self._decoded(layer, rows) for rows in _parts(layer)]
        first, padding = parts[0], layer.out_features - sum(len(part.scales) for part in parts)
        if padding:
            zero = 0 if self.scheme.form == "int-quantized" else 1 << (self.scheme.bits - 1)
            integers, zeros = (t.new_full((padding, t.shape[1]), zero) for t in (first.integers, first.zeros))
            parts.append(_Decoded(integers, first.scales.new_zeros(zeros.shape), zeros, first.groups))
        return parts

    def _decoded(self, layer: Linear, rows: slice) -> _Decoded:
        """Decodes the weight of one part."""
        scheme, count, columns = self.scheme, rows.stop - rows.start, layer.in_features
        has = {name: getattr(layer, _parameter(name, rows)) for name in layouts(scheme, layer, rows)}
        middle = 1 << (scheme.bits - 1)
        zeros: Tensor | int = 0
        if scheme.form == "int-quantized":
            integers, scales, zeros = has["weight"], has["weight_scale"], has.get("weight_zero_point", 0)
        elif scheme.form == "pack-quantized":
            integers, scales = unpacked(has["weight_packed"], scheme.bits)[:, :columns], has["weight_scale"]
            zeros = middle
            if not scheme.symmetric:
                zeros = unpacked(has["weight_zero_point"].t(), scheme.bits)[:, :count].t()
        elif scheme.form == "gptq":
            integers, scales = unpacked(has["qweight"].t(), scheme.bits), has["scales"].t()
            # Zero less one, which wraps around.
            zeros = (unpacked(has["qzeros"], scheme.bits).t() + scheme.zero_offset) & ((1 << scheme.bits) - 1)
        else:
            integers, scales = _awq_unpacked(has["qweight"], scheme.bits).t(), has["scales"].t()
            zeros = middle if scheme.symmetric else _awq_unpacked(has["qzeros"], scheme.bits).t()
        groups = has.get("weight_g_idx", has.get("g_idx"))
        if not isinstance(zeros, Tensor):
            zeros = torch.full_like(scales, zeros, dtype=torch.int32)
        if groups is None:
            size = group_size(scheme, layer)
            groups = torch.arange(columns, device=scales.device) // (size or columns)
            if size != scheme.group_size:  # ranks cut the checkpoint's groups
                assert layer.columns is not None
                ((begin, end),) = layer.columns.ranges
                stored = torch.arange(begin, end, size, device=scales.device) // scheme.group_size
                scales, zeros = (part[:, stored - begin // scheme.group_size] for part in (scales, zeros))
        if layer.columns is not None and scheme.act_order:  # a rank's columns may be of any group
            used, groups = groups.unique(return_inverse=True)
            scales, zeros = scales[:, used], zeros[:, used]
        if (order := layer.row_order(rows)) is not None:
            integers, scales, zeros = order(integers), order(scales), order(zeros)
        return _Decoded(integers.int(), scales.float(), zeros.int(), groups.long())


def _split_groups(groups: Tensor) -> tuple[Tensor, int, Tensor]:
    """Splits groups of any size into smaller ones of one size.

    Returns the columns in the order of their groups, with -1 where the last small group of a group is not full; the
    size of the small groups; and for each the group that it was a part of.
    """
    counts = groups.bincount()
    parts = -(-counts // _SMALL_GROUP)
    ordered = groups.argsort(stable=True)
    begins = (parts.cumsum(0) - parts) * _SMALL_GROUP - (counts.cumsum(0) - counts)
    order = groups.new_full((int(parts.sum()) * _SMALL_GROUP,), -1)
    order[begins[groups[ordered]] + torch.arange(len(groups), device=groups.device)] = ordered
    return order, _SMALL_GROUP, torch.arange(len(counts), device=groups.device).repeat_interleave(parts)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpacks unsigned integers from int32 words along the last dimension, the lowest bits first. Returns int32."""
    shifts = torch.arange(0, WORD_BITS, bits, device=words.device, dtype=torch.int32)
    integers: Tensor = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return integers.flatten(-2)


def _awq_unpacked(words: Tensor, bits: int) -> Tensor:
    order = torch.tensor(_AWQ_ORDER, device=words.device)
    integers = unpacked(words, bits)
    return integers.view(*words.shape, len(_AWQ_ORDER))[..., order].flatten(-2)


def _parts(layer: Linear) -> list[slice]:
    """Returns the rows of each of the checkpoint's layers that make up this one."""
    return list(layer.checkpoint_parts("").values())


def _parameter(name: str, rows: slice) -> str:
    return f"stored_{rows.start}_{name}"


def _placement(target: Tensor, layout: TensorLayout, stored: Part | None) -> Placement:
    """Returns the placement of one tensor. If it may be stored in several shapes, it is read whole and the rank's part
    cut out.
    """
    shapes = (layout.shape, *layout.other_shapes)
    if layout.other_shapes:
        return Placement(target, shapes, partial(_wide, layout.shape, stored))
    return Placement(target, shapes, part=stored)


def _wide(shape: tuple[int, ...], stored: Part | None, tensor: Tensor) -> Tensor:
    """Expands one scale for all, or one for each row, to one for each row and group, and cuts out this rank's part."""
    wide = tensor if tuple(tensor.shape) == shape else tensor.reshape(-1, 1).expand(shape)
    return wide if stored is None else stored.of(wide)
