"""4-bit rounding that looks at inputs: a clipping search for each group's scale, and GPTQ's compensation of its errors.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds column after column, and changes the columns that are left so that
the product with the calibration inputs stays as near as it can. Groups' ranges are clipped where that lowers the error,
weighted by the inputs' squares (the search of AWQ, Lin et al. 2023, arXiv 2306.00978). Pure arithmetic on tensors.
"""

import torch
from torch import Tensor

_LARGEST = 15
_DAMPING = (0.01, 0.1, 1.0)
"""Of the mean of the Hessian's diagonal, added to it: more where fp32 does not do with less."""
_SHARES = tuple(1 - step / 50 for step in range(21))
"""Of a group's range that are tried."""
_LEAST_SCALE = 2.0**-24
"""The least of fp16."""


def gptq_groups(weight: Tensor, hessian: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `on_load.rounded_groups`, for inputs x with `hessian` = sum of x x.T, [columns, columns] fp32."""
    left, hessian = weight.float().clone(), hessian.clone()
    rows, columns = left.shape
    diagonal = hessian.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1
    importance = diagonal.clone()
    compensation = _compensation(hessian)
    integers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for begin in range(0, columns, group):
        end = min(begin + group, columns)
        scale, zero = clipped_range(left[:, begin:end], importance[begin:end])
        scales.append(scale)
        zeros.append(zero)
        errors = torch.empty(rows, end - begin, device=weight.device)
        for column in range(begin, end):
            value = left[:, column]
            integer = (value / scale).round_().add_(zero).clamp_(0, _LARGEST)
            integers[:, column] = integer.to(torch.uint8)
            error = (value - (integer - zero) * scale) / compensation[column, column]
            left[:, column + 1 : end].addr_(error, compensation[column, column + 1 : end], alpha=-1)
            errors[:, column - begin] = error
        left[:, end:].addmm_(errors, compensation[begin:end, end:], alpha=-1)
    return integers, torch.stack(scales, 1), torch.stack(zeros, 1)


def _compensation(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped inverse: row by row, how an error goes into the columns behind it."""
    mean, identity = hessian.diagonal().mean(), torch.eye(len(hessian), device=hessian.device)
    for damping in _DAMPING:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * mean * identity)
        if not int(failed):
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
    return identity  # no compensation: the sums are not those of real numbers


def clipped_range(part: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (fp16 as fp32) and integer zero points [rows] of a group [rows, columns] with the least weighted error."""
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
