"""What is said of a product of few rows before it runs: how it is cut, and which rows reach it half normed."""

from dataclasses import dataclass

import torch

from mini_infer_engine.kernels.sizes import next_power_of_2

MAX_M = 64
SMALL_M = 16
"""Up to which small_m_gemm's kernel is faster; stream_k_gemm's has the rest."""


@dataclass(frozen=True, slots=True)
class SmallMConfig:
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
class PdlGemmConfig:
    """The same for pdl_gemm's kernel."""

    block_n: int
    """Columns that are computed together: 64 or 128, of a gated product half as many."""
    block_k: int
    """Of the width, fetched at a time: a multiple of 64."""
    splits: int
    """Programs that share each block of columns, at most."""
    stages: int
    """Fetched ahead: at least 2."""


@dataclass(frozen=True, slots=True)
class DeferredRMSNorm:
    """Rows that still lack their division by the root mean square."""

    values: torch.Tensor  # [rows, width], times the norm's weights
    square_sums: torch.Tensor  # [parts, row_block_of(rows)] fp32, sums of squares of the rows before the weights
    eps: float


def row_block_of(rows: int) -> int:
    """Rows of the tile that computes `rows` of them: 16, 32 or 64."""
    return max(SMALL_M, next_power_of_2(rows))


def token_block_of(rows: int) -> int:
    """The same of pdl_gemm's kernel: 8, 16, 32 or 64."""
    return max(8, next_power_of_2(rows))


def supports_pdl_gemm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether pdl_gemm's kernel can compute `x @ weight.T`: what the copy engine and the matrix units ask for."""
    halves = x.dtype in (torch.bfloat16, torch.float16)
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0 for tensor in (x, weight))
    return halves and aligned and weight.shape[1] % 64 == 0
