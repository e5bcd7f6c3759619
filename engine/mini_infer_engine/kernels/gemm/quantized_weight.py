"""Packs quantised weights for our GEMM kernels: in the order in which a thread of wgmma needs its operand's columns.

The instruction (PTX, wgmma.mma_async with its left operand in registers) expects columns 2t, 2t + 1, 2t + 8 and 2t + 9
of 16 from thread t of four. So that a thread loads 16 bytes at once, its columns are side by side: of 64 where a column
is a byte, of 128 where it is half of one (Frantar et al. 2024, Marlin, arXiv 2408.11743). Packing is done once, when
weights are loaded; kernels that read weights in another order bring x into the weights' order (`column_order`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 128
"""Columns that share a scale, unless scales are of whole rows; K is padded to a multiple of it."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] = (value - zero point) * scale, with scales of rows or of groups of GROUP columns."""

    values: Tensor  # [N, padded K] int8 or float8 e4m3fn, or [N, padded K / 2] uint8: two integers of 4 bits
    scales: Tensor  # [N] fp32 of rows; [padded K / GROUP, N] of groups: fp32, or int32: `packed_parameters`
    k: int
    """Columns before padding."""
    int8_activations: bool = False
    """True if products of many rows may round activations to int8, with a dynamic scale for each row."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, K) of the dequantised weight."""
        return self.values.shape[0], self.k

    @property
    def bits(self) -> int:
        """Bits of a value: 8 or 4."""
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def is_grouped(self) -> bool:
        """True if scales are of groups of columns."""
        return self.scales.ndim == 2

    @property
    def format(self) -> str:
        """The name of its tuned configs: int8, fp8 or int4, and with groups int8-groups or fp8-groups."""
        name = {torch.int8: "int8", torch.uint8: "int4"}.get(self.values.dtype, "fp8")
        return f"{name}-groups" if self.is_grouped and self.bits == 8 else name


def padded(values: Tensor, *, value: int = 0) -> Tensor:
    """Pads columns to a multiple of GROUP."""
    missing = -values.shape[1] % GROUP
    if not missing:
        return values
    return functional.pad(values.view(torch.uint8), (0, missing), value=value).view(values.dtype)


def interleaved(values: Tensor) -> Tensor:
    """Permutes 8-bit values [N, K] to the kernels' order, [N, padded K]: thread, step of 16 columns, odd, upper 8."""
    wide = padded(values.contiguous())
    steps = wide.view(torch.uint8).view(wide.shape[0], -1, 4, 2, 4, 2)  # 64 columns: step, upper 8, thread, odd
    return steps.permute(0, 1, 4, 2, 5, 3).reshape(wide.shape).view(values.dtype)


def packed_nibbles(integers: Tensor) -> Tensor:
    """Packs integers in [0, 15], uint8 [N, K], two in a byte in the kernels' order, [N, padded K / 2].

    A thread's 16 bytes of 128 columns are four words of 32 columns. Integer i of a word's eight is in the upper 8 of a
    step if its lowest bit is set, in the second step if the next one is, and odd if the highest one is.
    """
    wide = padded(integers.contiguous())
    # 128 columns: word, step, upper 8, thread, odd.
    words = wide.view(wide.shape[0], -1, 4, 2, 2, 4, 2).permute(0, 1, 5, 2, 6, 3, 4)
    return (words[..., 0] | (words[..., 1] << 4)).reshape(wide.shape[0], -1)


def packed_parameters(scale: Tensor, zero: Tensor) -> Tensor:
    """Packs scales and zero points of groups [N, groups] into words [groups, N]: fp16 below, the integer above."""
    low = scale.half().view(torch.int16).int() & 0xFFFF
    return (low | (zero.int() << 16)).t().contiguous()


def column_order(bits: int) -> Tensor:
    """Returns the column at each of 128 places: in the bytes of 8-bit values; or all low halves of 4-bit ones, then all
    high.
    """
    columns = torch.arange(GROUP, dtype=torch.int64)
    if bits == 8:
        return interleaved(columns.to(torch.uint8).view(1, GROUP)).view(GROUP).long()
    words = columns.view(4, 2, 2, 4, 2).permute(3, 0, 4, 1, 2).reshape(-1, 2)
    return words.t().reshape(GROUP)


def dequantized(weight: QuantizedWeight) -> Tensor:
    """Dequantises to fp32 [N, K], by plain torch: the reference for tests of kernels."""
    rows, order = weight.values.shape[0], column_order(weight.bits).to(weight.values.device)
    if weight.bits == 8:
        stored = weight.values.float().view(rows, -1, GROUP)
    else:
        low, high = (weight.values & 15, weight.values >> 4)
        stored = torch.cat([half.view(rows, -1, GROUP // 2) for half in (low, high)], dim=2).float()
    values = torch.empty_like(stored)
    values[:, :, order] = stored
    if not weight.is_grouped:
        return values.flatten(1)[:, : weight.k] * weight.scales[:, None]
    scales = weight.scales.t().unsqueeze(2)
    if weight.scales.dtype == torch.int32:
        values = values - (scales >> 16).float()
        scales = (scales & 0xFFFF).to(torch.int16).view(torch.float16).float()
    return (values * scales).flatten(1)[:, : weight.k]
