"""Rounds weights to 4 bits by their calibration inputs: clipping searches for group scales, and GPTQ's error
compensation.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds column after column, and changes the remaining columns so that the
product with the calibration inputs stays as close as possible. Coordinate descent then rounds each column again with
all others fixed (QuantEase, Behdin et al. 2023, arXiv 2309.01885). The range of a group is clipped if that lowers the
error (the search of AWQ, Lin et al. 2023, arXiv 2306.00978); each column's error is weighted by its cost when all other
columns compensate for it. The weight that is rounded first takes over a part of the correction for what the layers
rounded before it did to its inputs (QEP, Arai and Ichikawa 2025, arXiv 2504.09629). This module is arithmetic on
tensors alone; the columns of a block are rounded by kernels on GPUs with Triton.
"""

from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

_LARGEST = 15
_DAMPING = (0.1, 0.3, 1.0)
"""Damping that is added to the Hessian's diagonal, as a share of its mean.

The first value that has a Cholesky factor in fp32 is used. Less than the first overfits to the calibration texts.
"""
_BLOCK = 128
"""Columns in a block: their errors are propagated to the columns after the block together, as one product."""
_SHARES = tuple(1 - step / 50 for step in range(21))
"""Shares of a group's range that the clipping search tries."""
_LEAST_SCALE = 2.0**-24
"""The smallest positive fp16 number."""
_SWEEPS = 2
"""Sweeps of coordinate descent over all columns."""
_PROPAGATION = 0.5
"""QEP's largest strength: the share of its inputs' drift that a weight corrects. 1 would overfit to the calibration
texts.
"""


def propagation(tokens: int, columns: int) -> float:
    """Returns QEP's strength for a weight with `columns` columns: the fewer tokens, the less, as drift is known less
    well.

    It is scaled by the share of tokens that a regression on all columns leaves free, as in an adjusted coefficient of
    determination.
    """
    return _PROPAGATION * max(0.0, 1 - columns / tokens)


def gptq_groups(
    weight: Tensor, hessian: Tensor, group: int, drift: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a weight like `on_load.rounded_groups`, but for inputs x with `hessian` = sum of x x.T, [columns, columns]
    fp32.

    `drift` = sum of (y - x) x.T, of the same size, moves the products of x towards those that y has with the original
    weight; None if y is x. Columns are rounded by the size of their inputs, the largest first, while many columns are
    left to compensate. Groups remain those of neighbouring columns, and their scales are chosen before.
    """
    wide, hessian = weight.float(), hessian.clone()
    rows, columns = wide.shape
    if not bool(torch.isfinite(hessian).all()):  # an input overflowed its dtype: the sums say nothing
        hessian, drift = torch.eye(columns, device=weight.device), None
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    order = diagonal.argsort(descending=True, stable=True)
    damped, factor = _factors(hessian[order][:, order])
    compensation = damped if factor is None else factor
    if drift is not None and factor is not None:
        wide = wide.clone()
        wide[:, order] += (wide @ drift)[:, order] @ factor.t() @ factor
    importance = torch.empty_like(diagonal)
    importance[order] = 1 / compensation.square().sum(0)  # of the inverse's diagonal
    ranges = [
        clipped_range(wide[:, begin : begin + group], importance[begin : begin + group])
        for begin in range(0, columns, group)
    ]
    scale, zero = (torch.stack(each, 1) for each in zip(*ranges, strict=True))
    in_order = wide[:, order], scale[:, order // group], zero[:, order // group]
    sorted_weight, steps, middles = (one.contiguous() for one in in_order)
    rounded = _rounded(sorted_weight.clone(), steps, middles, compensation)
    for _ in range(_SWEEPS):
        _descend_(rounded, sorted_weight, steps, middles, damped)
    integers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    integers[:, order] = rounded.to(torch.uint8)
    return integers, scale, zero


def _rounded(left: Tensor, scale: Tensor, zero: Tensor, compensation: Tensor) -> Tensor:
    """Rounds columns in their order and returns the integers. All tensors are [rows, columns] fp32; `left` is
    overwritten.
    """
    integers = torch.empty_like(left)
    columns, round_block = left.shape[1], _block_rounding(left).round_columns
    for begin in range(0, columns, _BLOCK):
        block, behind = slice(begin, min(begin + _BLOCK, columns)), slice(begin + _BLOCK, None)
        errors = round_block(
            left[:, block], scale[:, block], zero[:, block], compensation[block, block], integers[:, block], _LARGEST
        )
        left[:, behind].addmm_(errors, compensation[block, behind], alpha=-1)
    return integers


def _descend_(integers: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, hessian: Tensor) -> None:
    """Rounds each column again, in place, to minimise the product's error with all other columns fixed.

    No step increases the error. All tensors but the Hessian are [rows, columns] fp32.
    """
    columns, descend_block_ = weight.shape[1], _block_rounding(weight).descend_columns_
    error = (integers - zero) * scale - weight
    for begin in range(0, columns, _BLOCK):
        block = slice(begin, min(begin + _BLOCK, columns))
        descend_block_(integers[:, block], scale[:, block], error @ hessian[:, block], hessian[block, block], _LARGEST)
        error[:, block] = (integers[:, block] - zero[:, block]) * scale[:, block] - weight[:, block]


class _BlockRounding(Protocol):
    """Rounds the columns of one block. `kernels.round_columns` and `_ByTorch` implement it."""

    def round_columns(
        self, left: Tensor, scale: Tensor, zero: Tensor, compensation: Tensor, integers: Tensor, largest: int
    ) -> Tensor:
        """Rounds a block's columns as `kernels.round_columns` documents; `left` may be overwritten."""

    def descend_columns_(
        self, integers: Tensor, scale: Tensor, gradient: Tensor, hessian: Tensor, largest: int
    ) -> None:
        """Runs a sweep of coordinate descent as `kernels.round_columns` documents; the gradient may be overwritten."""


class _ByTorch:
    """Rounds column by column with about ten operators each, on CPUs and on GPUs without Triton."""

    @staticmethod
    def round_columns(
        left: Tensor, scale: Tensor, zero: Tensor, compensation: Tensor, integers: Tensor, largest: int
    ) -> Tensor:
        """Rounds each column and compensates for its error in those after it. Returns the errors; `left` is
        overwritten.
        """
        errors = torch.empty_like(left)
        for column in range(left.shape[1]):
            value, step, middle = left[:, column], scale[:, column], zero[:, column]
            integer = (value / step).round_().add_(middle).clamp_(0, largest)
            integers[:, column] = integer
            error = (value - (integer - middle) * step) / compensation[column, column]
            left[:, column + 1 :].addr_(error, compensation[column, column + 1 :], alpha=-1)
            errors[:, column] = error
        return errors

    @staticmethod
    def descend_columns_(integers: Tensor, scale: Tensor, gradient: Tensor, hessian: Tensor, largest: int) -> None:
        """Rounds each column to the minimum of the error along it; the gradient is overwritten."""
        inverse = (hessian.diagonal() * scale).reciprocal_()
        for column, integer in enumerate(integers.unbind(1)):
            better = torch.addcmul(integer, gradient[:, column], inverse[:, column], value=-1)
            better.round_().clamp_(0, largest)
            change = (better - integer) * scale[:, column]
            gradient[:, column + 1 :].addr_(change, hessian[column, column + 1 :])
            integer.copy_(better)


def _block_rounding(tensor: Tensor) -> _BlockRounding:
    """Returns the kernels if the tensor is on a GPU that has Triton, else plain torch."""
    if tensor.device.type == "cuda" and find_spec("triton") is not None:
        from mini_infer_engine.kernels import round_columns

        return cast("_BlockRounding", round_columns)
    return _ByTorch()


def _factors(hessian: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the damped Hessian, and the upper triangular U of its inverse U.T @ U.

    Row i of U gives the propagation of column i's error to the columns after it. Returns the identity and None if there
    is no such factor in fp32; then nothing is compensated.
    """
    mean, identity = hessian.diagonal().mean(), torch.eye(len(hessian), device=hessian.device)
    for damping in _DAMPING:
        damped = hessian + damping * mean * identity
        # Of the columns in reverse order: turned round again it is the upper R of R @ R.T, and U is R's inverse.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not int(failed):
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            return damped, upper.contiguous()
    return identity, None


def clipped_range(part: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales (fp16 as fp32) and integer zero points [rows] of a group [rows, columns] with least weighted
    error.
    """
    low, high = part.amin(1).clamp_(max=0), part.amax(1).clamp_(min=0)
    best = torch.full_like(low, float("inf"))
    best_scale, best_zero = torch.empty_like(low), torch.empty_like(low)
    for share in _SHARES:
        scale = ((high - low) * (share / _LARGEST)).clamp_(min=_LEAST_SCALE).half().float()
        zero = (-low * share / scale).round_().clamp_(0, _LARGEST)
        integers = (part / scale[:, None]).round_().add_(zero[:, None]).clamp_(0, _LARGEST)
        made = (integers - zero[:, None]) * scale[:, None]
        error = ((made - part).square_() * importance).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero
