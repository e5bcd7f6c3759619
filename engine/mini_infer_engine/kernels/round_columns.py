"""GPTQ's rounding of a block of columns (Frantar et al. 2022, arXiv 2210.17323), and a sweep of coordinate descent over
it (QuantEase, Behdin et al. 2023, arXiv 2309.01885).

Columns are rounded one after another, each given the errors of those before. `quantization.gptq` does the same in
torch. Rows are independent: a program has some of them, with all columns of a block, in registers, where torch would
launch a dozen kernels for each column.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_ROWS = 16
"""Rows of one program."""
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a number below 2**22 to the nearest integer, ties to even."""


@triton.jit
def _nearest(x, low, high):
    """Returns the nearest integer in [low, high]."""
    x = tl.minimum(tl.maximum(x, low - 1.0), high + 1.0)
    return tl.minimum(tl.maximum((x + _TO_INTEGER) - _TO_INTEGER, low), high)


@triton.jit
def _block(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns a program's rows [ROWS, 1], all columns [1, COLUMNS], and the mask of those that exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _column(tile, is_here):
    """Returns one column [rows] of a tile [rows, columns]."""
    return tl.sum(tl.where(is_here, tile, 0.0), axis=1)


@triton.jit
def _round_columns(
    left, scale, zero, compensation, integers, errors, rows, columns, stride, factor_stride, largest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rounds each column, and propagates its error to the columns after it. One program per block of rows."""
    row, column, mask = _block(rows, columns, ROWS, COLUMNS)
    values = tl.load(left + row * stride + column, mask=mask, other=0.0)
    steps = tl.load(scale + row * stride + column, mask=mask, other=1.0)
    middles = tl.load(zero + row * stride + column, mask=mask, other=0.0)
    made = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    wrong = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for current in range(columns):
        is_here = column == current
        value, step, middle = _column(values, is_here), _column(steps, is_here), _column(middles, is_here)
        integer = _nearest(tl.div_rn(value, step), -middle, largest - middle) + middle
        factors = tl.load(compensation + current * factor_stride + column, mask=column < columns, other=0.0)
        own = tl.load(compensation + current * factor_stride + current)
        error = tl.div_rn(value - (integer - middle) * step, own + tl.zeros_like(value))
        values -= tl.where(column > current, error[:, None] * factors, 0.0)
        made = tl.where(is_here, integer[:, None], made)
        wrong = tl.where(is_here, error[:, None], wrong)
    tl.store(integers + row * stride + column, made, mask=mask)
    tl.store(errors + row * columns + column, wrong, mask=mask)


@triton.jit
def _descend_columns(
    integers, scale, gradient, hessian, rows, columns, stride, factor_stride, largest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rounds each column again, and updates the gradient of the columns after it. One program per block of rows."""
    row, column, mask = _block(rows, columns, ROWS, COLUMNS)
    made = tl.load(integers + row * stride + column, mask=mask, other=0.0)
    steps = tl.load(scale + row * stride + column, mask=mask, other=1.0)
    slopes = tl.load(gradient + row * columns + column, mask=mask, other=0.0)
    for current in range(columns):
        is_here = column == current
        integer, step, slope = _column(made, is_here), _column(steps, is_here), _column(slopes, is_here)
        factors = tl.load(hessian + current * factor_stride + column, mask=column < columns, other=0.0)
        own = tl.load(hessian + current * factor_stride + current)
        better = _nearest(integer - tl.div_rn(slope, own * step), 0.0, largest)
        change = (better - integer) * step
        slopes += tl.where(column > current, change[:, None] * factors, 0.0)
        made = tl.where(is_here, better[:, None], made)
    tl.store(integers + row * stride + column, made, mask=mask)


def round_columns(
    left: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    compensation: torch.Tensor,
    integers: torch.Tensor,
    largest: int,
) -> torch.Tensor:
    """Rounds a block of columns in their order (GPTQ): fills `integers`, and returns the scaled errors.

    All but `compensation` [columns, columns] are views [rows, columns] of matrices of one row stride, fp32; errors
    [rows, columns] are dense, and divided by the compensation's diagonal.
    """
    rows, columns = left.shape
    assert compensation.stride(1) == left.stride(1) == 1
    assert left.stride() == scale.stride() == zero.stride() == integers.stride()
    errors = torch.empty((rows, columns), dtype=torch.float32, device=left.device)
    _round_columns[(cdiv(rows, _ROWS),)](
        left, scale, zero, compensation, integers, errors, rows, columns, left.stride(0), compensation.stride(0),
        float(largest), ROWS=_ROWS, COLUMNS=next_power_of_2(columns), num_warps=4,
    )  # fmt: skip
    return errors


def descend_columns_(
    integers: torch.Tensor, scale: torch.Tensor, gradient: torch.Tensor, hessian: torch.Tensor, largest: int
) -> None:
    """Rounds each column of a block again, in place, by coordinate descent.

    `gradient` [rows, columns], dense, is the product of the error with the Hessian's columns, of which `hessian`
    [columns, columns] is the block's part.
    """
    rows, columns = integers.shape
    assert hessian.stride(1) == integers.stride(1) == 1
    assert integers.stride() == scale.stride()
    assert gradient.is_contiguous()
    _descend_columns[(cdiv(rows, _ROWS),)](
        integers, scale, gradient, hessian, rows, columns, integers.stride(0), hessian.stride(0), float(largest),
        ROWS=_ROWS, COLUMNS=next_power_of_2(columns), num_warps=4,
    )  # fmt: skip
