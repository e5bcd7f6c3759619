"""What is said of a product of few rows before it runs: how it is cut, and which rows reach it half normed."""

from dataclasses import dataclass

import torch

from mini_infer_engine.kernels.sizes import next_power_of_2

MAX_ROWS = 64
FEW_ROWS = 16
"""Up to which few_rows_linear's kernel is faster; even_shares_linear's has the rest."""


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How one shape is cut; the stored ones were measured by benchmarks/kernels.py."""

    block_n: int
    """Columns, which are rows of the weights, that are computed together."""
    block_k: int
    """Of the width, read at a time."""
    programs: int
    """At most so many programs share the work equally; 0: one for each block of columns. With few rows, as many
    programs share each block as make about this number together."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AheadConfig:
    """How one shape is cut for ahead_linear's kernel."""

    block_w: int
    """Rows of weights a program multiplies: 64 or 128; of a gated product half of them gate and half up."""
    block_t: int
    """Rows of x that are computed together."""
    block_k: int
    """Of the width, read at a time."""
    splits: int
    """Programs that share each block of columns."""
    stages: int
    warps: int = 4
    ahead: bool = True
    """Launched before the kernel before it has ended."""
    warm: int = 1
    """Whether the descriptor of x is fetched before x is there."""
    at_once: bool = True
    """Whether the next kernel may begin when this one does, or when the one before has ended."""


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """Rows that still lack their division by the root mean square."""

    values: torch.Tensor  # [rows, width], times the norm's weights
    square_sums: torch.Tensor  # [parts, row block] fp32, sums of squares of the rows before the weights
    eps: float


def row_block_of(rows: int) -> int:
    """Rows of the tile that computes `rows` of them: 16, 32 or 64."""
    return max(FEW_ROWS, next_power_of_2(rows))
