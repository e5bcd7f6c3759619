"""Defines tile configs of our GEMMs, x [M, K] @ weight [N, K].T, and inputs that the layer before has prepared."""

from dataclasses import dataclass

import torch

from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.sizes import next_power_of_2

MAX_M = 64
"""The largest number of rows for which our own GEMM kernels compute a product."""
SMALL_M = 16
"""The largest number of rows for which small_m_gemm is faster than stream_k_gemm."""
LARGE_TILE_N = 128
"""Rows of weights in a tile of large_m_gemm: 64 for each warpgroup."""


@dataclass(frozen=True, slots=True)
class SmallMConfig:
    """The launch config of small_m_gemm (M <= SMALL_M) and stream_k_gemm (more rows)."""

    block_n: int
    """Rows of the weights in a tile, which are columns of the output."""
    block_k: int
    """The width of K that is read at a time."""
    programs: int
    """The number of programs.

    stream_k_gemm: at most this many programs share all tiles' work equally; 0: one program per tile. small_m_gemm: K is
    split so that there are about this many programs in all.
    """
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class PdlGemmConfig:
    """The launch config of pdl_gemm."""

    block_n: int
    """Columns of the output in a tile: 64 or 128, or half as many for a gated GEMM."""
    block_k: int
    """The width of K that is fetched at a time: a multiple of 64."""
    splits: int
    """The largest number of programs that share the K of a tile."""
    stages: int
    """The number of stages of the ring in shared memory: at least 2."""
    warps: int = 4
    """Warps of a program: 4, or 8 for tiles of 128 rows of weights, 64 for each warpgroup."""
    wide: bool = False
    """True if TMA copies 128 bytes of a row of quantised weights at a time instead of 64.

    It then copies only the existing rows of x, and also the scales of groups. It needs no more memory.
    """


@dataclass(frozen=True, slots=True)
class LargeMConfig:
    """The launch config of large_m_gemm."""

    block_m: int
    """Rows of x in a tile: 64, 128 or 256."""
    block_k: int
    """The width of K that is fetched at a time: 64 or 128; 128 for 4-bit weights and for groups."""
    splits: int
    """The largest number of programs that share the K of a tile."""
    stages: int
    """The number of stages of the ring in shared memory: at least 2."""
    splits_last_wave: bool = False
    """True if only the tiles of an incomplete last wave are split, and only if their parts make at most one wave.

    False: all tiles are split.
    """


@dataclass(frozen=True, slots=True)
class W8A8GemmConfig:
    """The launch config of int8_gemm and fp8_block_gemm."""

    block_m: int
    block_n: int
    block_k: int
    """The width of K that is fetched at a time: 64 or 128."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class DeferredRMSNorm:
    """Rows whose RMSNorm lacks the division by the root mean square, which the GEMM that reads them applies."""

    values: torch.Tensor  # [M, K], times the norm's weights
    square_sums: torch.Tensor  # [parts, portable_block_m(M)] fp32, sums of squares of the rows before the weights
    eps: float


def portable_block_m(m: int) -> int:
    """Returns the rows in a tile of small_m_gemm and stream_k_gemm: 16, 32 or 64."""
    return max(SMALL_M, next_power_of_2(m))


def pdl_block_m(m: int) -> int:
    """Returns the rows in a tile of pdl_gemm: 8, 16, 32 or 64."""
    return max(8, next_power_of_2(m))


def are_tma_operands(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> bool:
    """True if pdl_gemm can compute `x @ weight.T`: TMA reads rows that begin at 16 bytes, in panels of 64 values.

    Quantised weights are widened to bf16 on the way.
    """
    halves = x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and isinstance(weight, torch.Tensor))
    memory = weight if isinstance(weight, torch.Tensor) else weight.values
    aligned = all(
        tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.itemsize % 16 == 0 for tensor in (x, memory)
    )
    # Scales of groups may be copied by TMA, too, those of a gated GEMM's halves apart.
    scales = weight.scales if isinstance(weight, QuantizedWeight) and weight.is_grouped else None
    aligned = aligned and (scales is None or (scales.data_ptr() % 16 == 0 and weight.shape[0] % 8 == 0))
    return halves and aligned and weight.shape[1] % 64 == 0


def are_large_m_operands(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """True if large_m_gemm can compute `x @ weight.T`: bf16, with rows of x that begin at 16 bytes, as TMA needs."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 and x.stride(1) == 1
    return aligned and x.dtype == torch.bfloat16 and weight.values.data_ptr() % 16 == 0
