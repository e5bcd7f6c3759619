"""Packs whole pages of keys and values to four bits an element, and unpacks them, at about the speed of memory.

The arithmetic is that of `runtime.memory.int4_rows`: rows are rotated by tensor cores, which is exact, since matrix and
levels are bfloat16 numbers and sums are fp32; pages in fp32 are rotated in fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

_BLOCKS = {torch.bfloat16: 64, torch.float32: 16}
"""Rows of one program. Products in fp32 have no tensor cores, and tiles as large as those of bf16 would spill."""
_NUM_WARPS = 8
_UPPER: tl.constexpr = tl.constexpr(8)
"""Levels above zero."""
_SMALLEST_DEVIATION: tl.constexpr = tl.constexpr(2.0**-60)
"""Divisor of rows that are all zeros, as in `int4_rows`."""


class Int4Tables(NamedTuple):
    """The constants of the format, on the device."""

    rotation: torch.Tensor
    """[size, size] in the pages' dtype, 1 or -1: `int4_rows.rotation` times the root of the size."""
    thresholds: torch.Tensor
    """[15] fp32."""
    levels: torch.Tensor
    """[16] fp32."""


@triton.jit
def _nearest_levels(x, thresholds, levels):
    """Returns the code of the level nearest to each element, and the level in fp32."""
    size, place = tl.abs(x), tl.zeros(x.shape, dtype=tl.int32)
    for index in tl.static_range(_UPPER - 1):
        place += (size > tl.load(thresholds + _UPPER + index)).to(tl.int32)
    code = tl.where(x > 0, _UPPER + place, _UPPER - 1 - place)
    return code, tl.load(levels + code)


@triton.jit
def _pack_pages(
    pages, page_ids, codes, scales, rotation, thresholds, levels, page_elements, num_rows, packed_bytes,
    SIZE: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Packs one block of rows of one page, with one program per (page, block)."""
    page = tl.load(page_ids + tl.program_id(0)).to(tl.int64)
    packed = tl.program_id(0).to(tl.int64) * packed_bytes
    rows, columns, half = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)), tl.arange(0, SIZE), tl.arange(0, SIZE // 2)
    is_row = rows < num_rows
    x = tl.load(pages + page * page_elements + rows[:, None] * SIZE + columns[None, :], mask=is_row[:, None], other=0.0)
    matrix = rotation + columns[:, None] * SIZE + half[None, :]
    low = tl.dot(x, tl.load(matrix), input_precision="ieee") * ROOT
    high = tl.dot(x, tl.load(matrix + SIZE // 2), input_precision="ieee") * ROOT
    mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / SIZE
    deviation = tl.maximum(tl.sqrt(mean), _SMALLEST_DEVIATION)[:, None]
    low_code, low_level = _nearest_levels(low / deviation, thresholds, levels)
    high_code, high_level = _nearest_levels(high / deviation, thresholds, levels)
    product = tl.sum(low * low_level, axis=1) + tl.sum(high * high_level, axis=1)
    square = tl.sum(low_level * low_level, axis=1) + tl.sum(high_level * high_level, axis=1)
    byte = (low_code | (high_code << 4)).to(tl.uint8)
    tl.store(codes + packed + rows[:, None] * (SIZE // 2) + half[None, :], byte, mask=is_row[:, None])
    tl.store(scales + packed // 2 + rows, (product / square).to(tl.bfloat16), mask=is_row)


@triton.jit
def _unpack_pages(
    pages, page_ids, codes, scales, rotation, levels, page_elements, num_rows, packed_bytes,
    SIZE: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Unpacks one block of rows of one page, with one program per (page, block)."""
    page = tl.load(page_ids + tl.program_id(0)).to(tl.int64)
    packed = tl.program_id(0).to(tl.int64) * packed_bytes
    rows, columns, half = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)), tl.arange(0, SIZE), tl.arange(0, SIZE // 2)
    is_row = rows < num_rows
    byte = tl.load(codes + packed + rows[:, None] * (SIZE // 2) + half[None, :], mask=is_row[:, None], other=0)
    scale = tl.load(scales + packed // 2 + rows, mask=is_row, other=0.0).to(tl.float32) * ROOT
    code = byte.to(tl.int32)
    dtype: tl.constexpr = pages.dtype.element_ty
    matrix = rotation + columns[None, :] * SIZE + half[:, None]  # transposed
    x = tl.dot(tl.load(levels + (code & 15)).to(dtype), tl.load(matrix), input_precision="ieee")
    x += tl.dot(tl.load(levels + (code >> 4)).to(dtype), tl.load(matrix + SIZE // 2), input_precision="ieee")
    out = pages + page * page_elements + rows[:, None] * SIZE + columns[None, :]
    tl.store(out, (x * scale[:, None]).to(dtype), mask=is_row[:, None])


def pack_pages(
    pages: torch.Tensor, page_ids: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tables: Int4Tables
) -> None:
    """Packs pages [pages, rows, size] with these ids [n] int64 into codes [n, rows * size / 2] uint8 and scales
    [n, rows] bf16, which are columns of the same memory.
    """
    (_, num_rows, size), block = pages.shape, _BLOCKS[pages.dtype]
    _pack_pages[page_ids.shape[0], cdiv(num_rows, block)](
        pages, page_ids, codes, scales, *tables,
        pages.stride(0), num_rows, codes.stride(0), SIZE=size, ROOT=size**-0.5, BLOCK=block, num_warps=_NUM_WARPS
    )  # fmt: skip


def unpack_pages(
    codes: torch.Tensor, scales: torch.Tensor, pages: torch.Tensor, page_ids: torch.Tensor, tables: Int4Tables
) -> None:
    """Unpacks codes and scales, as `pack_pages` has left them, into pages [pages, rows, size] with these ids [n]."""
    (_, num_rows, size), block = pages.shape, _BLOCKS[pages.dtype]
    _unpack_pages[page_ids.shape[0], cdiv(num_rows, block)](
        pages, page_ids, codes, scales, tables.rotation, tables.levels,
        pages.stride(0), num_rows, codes.stride(0), SIZE=size, ROOT=size**-0.5, BLOCK=block, num_warps=_NUM_WARPS
    )  # fmt: skip
