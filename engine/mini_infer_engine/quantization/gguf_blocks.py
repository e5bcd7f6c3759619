"""Decodes blocks of GGUF files (ggml's quantisation formats) to integers with scales, which kernels multiply with.

ggml stores a row as blocks of 32 or 256 columns. A block has integers of a few bits, interleaved, and scales of groups
of 16 or 32 columns, with minima in some formats; "K" formats store those as integers, too, with a scale for the block
(llama.cpp's ggml-quants.c and ggml-common.h). Knows neither layers nor files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, packed_pairs, rows_joined

_SCALE_ERROR = 2.0**-11
"""Relative error of rounding to fp16: up to this part of a row's largest scale may be lost."""
_CHUNK = 1 << 26
"""Weights that are decoded at once: intermediate results take several bytes for each."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the non-linear formats IQ4_NL and IQ4_XS (kvalues_iq4nl)."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded weight: (integer - zero) * scale + minimum."""

    integers: Tensor  # [rows, columns] uint8 in [0, 15], or int8
    scales: Tensor  # [rows, groups] fp32
    minima: Tensor | None  # [rows, groups] fp32
    zero: int = 0

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> "Decoded":
        """Returns the weight with another order of rows."""
        minima = None if self.minima is None else change(self.minima)
        return replace(self, integers=change(self.integers), scales=change(self.scales), minima=minima)

    def columns(self, ranges: Sequence[tuple[int, int]]) -> "Decoded":
        """Returns ranges of columns, which begin and end at groups."""
        group = self.integers.shape[1] // self.scales.shape[1]

        def cut(tensor: Tensor, together: int) -> Tensor:
            pieces = [tensor[:, begin // together : end // together] for begin, end in ranges]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

        minima = None if self.minima is None else cut(self.minima, group)
        return replace(self, integers=cut(self.integers, 1), scales=cut(self.scales, group), minima=minima)

    def grouped(self, dtype: torch.dtype) -> GroupedWeight:
        """Returns the form that kernels read, with fp16 scales unless `dtype`, the model's, is fp32.

        Scales that fp16 cannot represent stay fp32.
        """
        columns, groups = self.integers.shape[1], self.scales.shape[1]
        zeros = None if self.minima is None else _stored(self.minima, dtype)
        if self.zero:
            zeros = torch.full_like(self.scales, self.zero, dtype=torch.uint8)
        scales, group = _stored(self.scales, dtype), columns // groups
        if self.integers.dtype == torch.int8:
            return GroupedWeight("int8", self.integers.contiguous(), scales, columns, group, zeros)
        return GroupedWeight("int4", packed_pairs(self.integers), scales, columns, group, zeros)


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The layout of a format's blocks."""

    columns: int
    """Weights of a block."""
    size: int
    """Bytes of a block."""
    group: int
    """Columns that share a scale."""
    bits: int
    """Bits of an integer as kernels read it: 4 or 8."""
    decode: Callable[[Tensor], Decoded]
    """Decodes blocks [blocks, size] uint8 to weights [blocks, columns]."""

    def decoded(self, rows: Tensor) -> Decoded:
        """Decodes rows of blocks, [rows, blocks * size] uint8, on their device."""
        made = self.decode(rows.reshape(-1, self.size))
        return made.rearranged(lambda part: part.reshape(len(rows), -1))

    def grouped(
        self, rows: Tensor, dtype: torch.dtype, columns: Sequence[tuple[int, int]] | None = None
    ) -> GroupedWeight:
        """Decodes rows of blocks, or ranges of their columns, to the form that kernels read, some rows at a time."""
        at_once = max(1, _CHUNK // (rows.shape[1] // self.size * self.columns))
        decoded = map(self.decoded, torch.split(rows, at_once))
        parts = [(part if columns is None else part.columns(columns)).grouped(dtype) for part in decoded]
        return parts[0] if len(parts) == 1 else rows_joined(parts)


def in_one_form(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """Returns integer weights in the narrowest form that all of them have without loss, so that they can be joined."""
    if len({(weight.kind, weight.group, _has_minima(weight)) for weight in weights}) == 1:
        return list(weights)
    has_minima = any(_has_minima(weight) for weight in weights)
    kind = "int8" if any(weight.kind == "int8" for weight in weights) else "int4"
    group = gcd(*(weight.group for weight in weights))
    return [_in_form(weight, kind == "int8", group, has_minima) for weight in weights]


def _in_form(weight: GroupedWeight, is_wide: bool, group: int, has_minima: bool) -> GroupedWeight:
    scales, zeros, values = weight.scales, weight.zeros, weight.values
    if is_wide and weight.kind == "int4":
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).to(torch.int8)
        if zeros is not None and not _has_minima(weight):
            values -= zeros.to(torch.int8).repeat_interleave(weight.group, dim=-1)
            zeros = None
    if has_minima and zeros is not None and not zeros.is_floating_point():
        zeros = -scales * zeros
    times = weight.group // group
    if times > 1:
        scales = scales.repeat_interleave(times, dim=-1)
        zeros = None if zeros is None else zeros.repeat_interleave(times, dim=-1)
    return replace(
        weight, kind="int8" if is_wide else weight.kind, values=values, scales=scales, zeros=zeros, group=group
    )


def _has_minima(weight: GroupedWeight) -> bool:
    return weight.zeros is not None and weight.zeros.is_floating_point()


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return scales
    half = scales.half()
    error = (half.float() - scales).abs().amax(dim=-1)
    return half if bool((error <= scales.abs().amax(dim=-1) * _SCALE_ERROR).all()) else scales


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the fp16 number at a byte of each block, [blocks, 1] fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(content: Tensor) -> Tensor:
    """Returns the low half of each byte, then the high half of each, along the last dimension."""
    return torch.cat([content & 15, content >> 4], dim=-1)


def _bits(content: Tensor, width: int) -> Tensor:
    """Returns integers of `width` bits, [..., 8 / width, bytes]: the lowest bits of all bytes first."""
    shifts = torch.arange(0, 8, width, device=content.device, dtype=torch.uint8)
    return (content.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << width) - 1)


def _each_bit(content: Tensor) -> Tensor:
    """Returns the bits of bytes in order, the lowest of each first: [..., 8 * bytes]."""
    return _bits(content, 1).transpose(-1, -2).flatten(-2)


def _q4_0(blocks: Tensor) -> Decoded:
    return Decoded(_halves(blocks[:, 2:]), _half(blocks, 0), None, 8)


def _q4_1(blocks: Tensor) -> Decoded:
    return Decoded(_halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Decoded:
    integers = (_halves(blocks[:, 6:]) | (_each_bit(blocks[:, 2:6]) << 4)).to(torch.int8) - 16
    return Decoded(integers, _half(blocks, 0), None)


def _q5_1(blocks: Tensor) -> Decoded:
    integers = (_halves(blocks[:, 8:]) | (_each_bit(blocks[:, 4:8]) << 4)).to(torch.int8)
    return Decoded(integers, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Decoded:
    return Decoded(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None)


def _q2_k(blocks: Tensor) -> Decoded:
    both = blocks[:, :16]
    integers = _bits(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1)
    return Decoded(integers, _half(blocks, 80) * (both & 15), -_half(blocks, 82) * (both >> 4))


def _q3_k(blocks: Tensor) -> Decoded:
    high = _bits(blocks[:, :32], 1).flatten(1)  # a bit for each 32 columns
    integers = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1) | (high << 2)
    low, top = _halves(blocks[:, 96:104]), _bits(blocks[:, 104:108], 2).flatten(1)
    scales = (low | (top << 4)).to(torch.int8) - 32
    return Decoded(integers, _half(blocks, 108) * scales, None, 4)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eight scales and eight minima of 6 bits out of 12 bytes [blocks, 12] (get_scale_min_k4)."""
    first, second, last = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (last & 15) | ((first >> 6) << 4)], dim=1)
    return scales, torch.cat([second & 63, (last >> 4) | ((second >> 6) << 4)], dim=1)


def _q4_k(blocks: Tensor) -> Decoded:
    scales, minima = _six_bits(blocks[:, 4:16].contiguous())
    integers = _halves(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return Decoded(integers, _half(blocks, 0) * scales, -_half(blocks, 2) * minima)


def _q5_k(blocks: Tensor) -> Decoded:
    scales, minima = _six_bits(blocks[:, 4:16].contiguous())
    high = _bits(blocks[:, 16:48], 1).flatten(1)
    integers = _halves(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1) | (high << 4)
    return Decoded(integers.to(torch.int8), _half(blocks, 0) * scales, -_half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> Decoded:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Decoded((low | (high << 4)).to(torch.int8) - 32, _half(blocks, 208) * scales, None)


def _iq4_values(nibbles: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.int8, device=nibbles.device)[nibbles.int()]


def _iq4_nl(blocks: Tensor) -> Decoded:
    return Decoded(_iq4_values(_halves(blocks[:, 2:])), _half(blocks, 0), None)


def _iq4_xs(blocks: Tensor) -> Decoded:
    low = _bits(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    high = _bits(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    scales = (low | (high << 4)).to(torch.int8) - 32
    integers = _iq4_values(_halves(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1))
    return Decoded(integers, _half(blocks, 0) * scales, None)


FORMS = {
    "Q4_0": BlockForm(32, 18, 32, 4, _q4_0),
    "Q4_1": BlockForm(32, 20, 32, 4, _q4_1),
    "Q5_0": BlockForm(32, 22, 32, 8, _q5_0),
    "Q5_1": BlockForm(32, 24, 32, 8, _q5_1),
    "Q8_0": BlockForm(32, 34, 32, 8, _q8_0),
    "Q2_K": BlockForm(256, 84, 16, 4, _q2_k),
    "Q3_K": BlockForm(256, 110, 16, 4, _q3_k),
    "Q4_K": BlockForm(256, 144, 32, 4, _q4_k),
    "Q5_K": BlockForm(256, 176, 32, 8, _q5_k),
    "Q6_K": BlockForm(256, 210, 16, 8, _q6_k),
    "IQ4_NL": BlockForm(32, 18, 32, 8, _iq4_nl),
    "IQ4_XS": BlockForm(256, 136, 32, 8, _iq4_xs),
}
"""Formats by ggml's names whose weights are integers with scales; others are dequantised when they are read."""
