"""Rounds keys and values to four bits an element, with a scale for each token and head. It knows rows, not pages.

Rows are rotated first: signs that are fixed, then a Hadamard transform, which spreads a few large elements over all.
Whatever they were, the elements of a row are then about normal (QuIP#, Tseng et al. 2024; QuaRot, Ashkboos et al.
2024). Each element becomes the nearest of the 16 levels that lose least of a normal distribution (Lloyd 1982, Max
1960), and the row gets the scale that loses least with these levels. `kernels.int4_pages` does the same on a GPU.
"""

import hashlib
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from mini_infer_engine.models.kv_spec import SCALE_DTYPE

NAME = "int4, rotated, Lloyd-Max levels, 1"
"""Names the arithmetic; the number at its end changes whenever packed rows mean something else."""
ROW_SIZES = (128, 64, 32)
"""Elements of a row, which is a head or an equal part of it. Powers of two, for the transform."""
_UPPER_LEVELS = (0.1279296875, 0.388671875, 0.65625, 0.94140625, 1.2578125, 1.6171875, 2.0625, 2.734375)
"""The levels above zero for a standard deviation of 1, rounded to bfloat16; those below are their negatives."""
LEVELS = (*(-level for level in reversed(_UPPER_LEVELS)), *_UPPER_LEVELS)
THRESHOLDS = tuple((low + high) / 2 for low, high in pairwise(LEVELS))
"""The midpoints between neighbouring levels. A code is the number of thresholds below an element."""
SMALLEST_DEVIATION = 2.0**-60
"""Divisor of rows that are all zeros; its square is still a normal number."""


def row_size(*head_dims: int) -> int | None:
    """Returns the elements of a row for heads of these sizes, or None if no size divides them all."""
    return next((size for size in ROW_SIZES if not any(head_dim % size for head_dim in head_dims)), None)


def row_bytes(size: int) -> int:
    """Returns the bytes of a packed row: codes, and its scale."""
    return size // 2 + SCALE_DTYPE.itemsize


@cache
def signs(size: int) -> tuple[int, ...]:
    """Returns the sign of each element of a row, 1 or -1: the same in every process and version of torch."""
    bits = int.from_bytes(hashlib.shake_256(NAME.encode()).digest(size // 8), "little")
    return tuple(1 - 2 * (bits >> place & 1) for place in range(size))


@cache
def rotation(size: int) -> Tensor:
    """Returns the matrix [size, size] fp32 that rotates rows from the left, and its transpose them back: signs, then a
    Hadamard matrix, over the root of the size.
    """
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    matrix *= torch.tensor(signs(size)).unsqueeze(1) * size**-0.5
    return matrix


def pack_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [n, size / 2] uint8 and scales [n] of rows [n, size].

    A byte has the code of an element of the first half of a row in its low bits, and of one of the second half above.
    """
    rotated = rows.float() @ rotation(rows.shape[1])
    deviations = rotated.square().mean(1, keepdim=True).sqrt_().clamp_min_(SMALLEST_DEVIATION)
    codes = torch.bucketize(rotated / deviations, torch.tensor(THRESHOLDS))
    levels = torch.tensor(LEVELS)[codes]
    scales = (rotated * levels).sum(1) / levels.square().sum(1)
    low, high = codes.to(torch.uint8).chunk(2, dim=1)
    return low | high << 4, scales.to(SCALE_DTYPE)


def unpack_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows [n, size] in `dtype` that were packed to codes [n, size / 2] and scales [n]."""
    levels = torch.tensor(LEVELS)[torch.cat((codes & 15, codes >> 4), dim=1).int()]
    return (levels @ rotation(levels.shape[1]).mT * scales.float().unsqueeze(1)).to(dtype)
