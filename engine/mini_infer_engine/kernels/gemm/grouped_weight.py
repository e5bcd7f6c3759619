"""Stores quantised weights of any group size, in the checkpoint's order of columns: all that `quantized_weight` cannot.

These are 4-bit floats (E2M1) with scales of 16 or 32 columns, integers of groups of 32 and 64 or with columns in
another order (act-order), and experts, which are stacked along the first dimension. The kernels are
`grouped_weight_gemm` and those of `kernels.moe`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.kernels.gemm.mx_order import (
    BLOCK_ROWS,
    GROUP_COLUMNS,
    mx_ordered,
    mx_scales,
    mx_scales_of_rows,
    mx_unordered,
)

Kind = Literal["int8", "fp8", "int4", "fp4", "mxfp4"]
"""mxfp4: 4-bit floats in the order of `mx_order`, with a power of two for 32 columns; `moe.mx_experts` reads them."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the highest is the sign (OCP Microscaling Formats 1.0, table 4)."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [..., N, K] = (value - zero point) * scale * factor; with minima value * scale + minimum."""

    kind: Kind
    values: Tensor
    """Values [..., N, K] int8 or float8 e4m3fn, or [..., N, (K + 1) // 2] uint8, the earlier column in the low half."""
    scales: Tensor
    """Scales: [..., N, groups] floats, or uint8 if they are powers of two (E8M0: 2 ** (byte - 127)); of the kind mxfp4
    they are those of `mx_order.mx_scales`.
    """
    k: int
    group: int
    """Columns that share a scale; 0: the whole row."""
    zeros: Tensor | None = None
    """Zero points as integers, or minima as floats, [..., N, groups]; None: zero."""
    factors: Tensor | None = None
    """Factors of rows, [..., N] fp32; None: one."""
    order: Tensor | None = None
    """The column of x at each place, [K] int32, -1 for none; None: columns are in x's order."""
    in_features: int | None = None
    """The number of columns of x, if some places have none; None: K."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, columns of x) of the dequantised weight, or of one in the stack."""
        return self.values.shape[-2], self.k if self.in_features is None else self.in_features

    @property
    def bits(self) -> int:
        """Bits of a value: 8 or 4."""
        return 4 if self.values.dtype == torch.uint8 else 8

    def at(self, index: int | slice | Tensor) -> "GroupedWeight":
        """Returns one weight of a stack, or some rows of one weight."""
        parts = (self.scales, self.zeros, self.factors)
        scales, zeros, factors = (None if part is None else part[index] for part in parts)
        assert scales is not None
        return replace(self, values=self.values[index], scales=scales, zeros=zeros, factors=factors)

    def columns(self, begin: int, end: int) -> "GroupedWeight":
        """Returns some columns. Raises ValueError if they cut through groups."""
        if self.group and (begin % self.group or (end % self.group and end != self.k)):
            raise ValueError(f"columns {begin} to {end} cut through groups of {self.group}")
        assert self.order is None, "columns in another order are not split"
        a_byte = 8 // self.bits
        groups = slice(begin // self.group, -(-end // self.group)) if self.group else slice(None)
        values = self.values[..., begin // a_byte : -(-end // a_byte)]
        zeros = None if self.zeros is None else self.zeros[..., groups]
        scales = self.scales[..., groups]
        return replace(self, values=values, scales=scales, zeros=zeros, k=end - begin, in_features=None)


def ordered_for_mx_experts(weight: GroupedWeight) -> GroupedWeight:
    """Arranges a stack for `moe.mx_experts`, or returns it as it is if that kernel has no such weights."""
    is_mx = weight.kind == "fp4" and weight.group == GROUP_COLUMNS and weight.scales.dtype == torch.uint8
    is_mx = is_mx and weight.k % GROUP_COLUMNS == 0 and weight.shape[0] % BLOCK_ROWS == 0
    if not is_mx or weight.factors is not None or weight.order is not None:
        return weight
    return replace(weight, kind="mxfp4", values=mx_ordered(weight.values), scales=mx_scales(weight.scales))


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Stacks weights of one form and shape."""
    return _joined(weights, torch.stack)


def rows_joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenates the rows of weights of one form and width."""
    return _joined(weights, torch.cat)


def _joined(weights: Sequence[GroupedWeight], join: Callable[[list[Tensor]], Tensor]) -> GroupedWeight:
    assert all(weight.order is None for weight in weights), "each would need its own order"

    def of(name: str) -> Tensor | None:
        found = [(weight, getattr(weight, name)) for weight in weights]
        dtypes = [part.dtype for _, part in found if part is not None]
        if not dtypes:
            return None
        dtype: torch.dtype = reduce(torch.promote_types, dtypes)
        # Zero points that are all zero are left out, and scales that float16 does for are in it.
        parts = [(torch.zeros_like(weight.scales) if part is None else part).to(dtype) for weight, part in found]
        return join([part.view(torch.uint8) if dtype.itemsize == 1 else part for part in parts]).view(dtype)

    values, scales = of("values"), of("scales")
    assert values is not None
    assert scales is not None
    return replace(weights[0], values=values, scales=scales, zeros=of("zeros"), factors=of("factors"))


def packed_pairs(integers: Tensor) -> Tensor:
    """Packs two columns into a byte, uint8 [..., N, (K + 1) // 2], from integers in [0, 15]."""
    wide = functional.pad(integers.to(torch.uint8), (0, integers.shape[-1] % 2))
    return wide[..., ::2] | (wide[..., 1::2] << 4)


def dequantized_groups(weight: GroupedWeight) -> Tensor:
    """Dequantises to fp32 [..., N, K], columns in x's order, by plain torch: the reference for tests of kernels."""
    values = _wide(weight)
    scales = mx_scales_of_rows(weight.scales) if weight.kind == "mxfp4" else scales_as_floats(weight.scales)
    if weight.zeros is None:
        made = values * _by_column(scales, weight)
    elif weight.zeros.is_floating_point():
        made = values * _by_column(scales, weight) + _by_column(weight.zeros.float(), weight)
    else:
        made = (values - _by_column(weight.zeros.float(), weight)) * _by_column(scales, weight)
    if weight.factors is not None:
        made = made * weight.factors.unsqueeze(-1)
    if weight.order is None:
        return made
    unordered = made.new_empty((*made.shape[:-1], weight.shape[1]))
    is_column = weight.order >= 0
    unordered[..., weight.order[is_column].long()] = made[..., is_column]
    return unordered


def scales_as_floats(scales: Tensor) -> Tensor:
    """Converts scales to fp32, from floats or from powers of two."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def _wide(weight: GroupedWeight) -> Tensor:
    if weight.bits == 8:
        return weight.values.float()
    values = mx_unordered(weight.values) if weight.kind == "mxfp4" else weight.values
    halves = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)[..., : weight.k]
    if weight.kind == "int4":
        return halves.float()
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=halves.device)
    return table[halves.long()]


def _by_column(parameters: Tensor, weight: GroupedWeight) -> Tensor:
    group = weight.group or weight.k
    return parameters.unsqueeze(-1).expand(*parameters.shape, group).flatten(-2)[..., : weight.k]
