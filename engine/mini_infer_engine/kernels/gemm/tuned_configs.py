"""How skinny products are cut, by shape: measured on an H200, stored for a quick start."""

import torch

from mini_infer_engine.kernels.gemm.gemm_config import (
    SMALL_M,
    PdlGemmConfig,
    SmallMConfig,
    row_block_of,
    token_block_of,
)
from mini_infer_engine.kernels.sizes import MULTIPROCESSORS, cdiv

PDL_GEMM: dict[tuple[int, int, bool, int], PdlGemmConfig | SmallMConfig | None] = {
    (1024, 2048, False, 8): PdlGemmConfig(64, 128, 4, 4),
    (1024, 2048, False, 16): PdlGemmConfig(64, 256, 3, 3),
    (1024, 2048, False, 32): PdlGemmConfig(64, 128, 3, 6),
    (1024, 2048, False, 64): PdlGemmConfig(64, 256, 3, 3),
    (1024, 3072, False, 8): PdlGemmConfig(64, 128, 3, 8),
    (1024, 3072, False, 16): PdlGemmConfig(64, 256, 3, 4),
    (1024, 3072, False, 32): PdlGemmConfig(64, 256, 3, 4),
    (1024, 3072, False, 64): PdlGemmConfig(64, 128, 3, 7),
    (1536, 1536, False, 8): PdlGemmConfig(64, 256, 2, 3),
    (1536, 1536, False, 16): PdlGemmConfig(64, 256, 2, 3),
    (1536, 1536, False, 32): PdlGemmConfig(64, 128, 2, 6),
    (1536, 1536, False, 64): PdlGemmConfig(64, 128, 2, 6),
    (1536, 8960, False, 8): PdlGemmConfig(64, 256, 4, 6),
    (1536, 8960, False, 16): PdlGemmConfig(64, 256, 3, 5),
    (1536, 8960, False, 32): PdlGemmConfig(64, 256, 3, 4),
    (1536, 8960, False, 64): PdlGemmConfig(64, 128, 2, 7),
    (2048, 1536, False, 8): PdlGemmConfig(128, 128, 3, 4),
    (2048, 1536, False, 16): PdlGemmConfig(64, 256, 2, 3),
    (2048, 1536, False, 32): PdlGemmConfig(64, 256, 2, 3),
    (2048, 1536, False, 64): PdlGemmConfig(64, 256, 2, 3),
    (3072, 1024, True, 8): PdlGemmConfig(32, 256, 1, 4),
    (3072, 1024, True, 16): PdlGemmConfig(32, 256, 1, 4),
    (3072, 1024, True, 32): PdlGemmConfig(32, 256, 1, 4),
    (3072, 1024, True, 64): PdlGemmConfig(32, 256, 1, 3),
    (3584, 3584, False, 8): PdlGemmConfig(64, 256, 1, 6),
    (3584, 3584, False, 16): PdlGemmConfig(64, 256, 1, 5),
    (3584, 3584, False, 64): PdlGemmConfig(64, 128, 1, 7),
    (3584, 18944, False, 8): PdlGemmConfig(64, 256, 1, 6),
    (3584, 18944, False, 16): PdlGemmConfig(64, 256, 2, 5),
    (3584, 18944, False, 64): PdlGemmConfig(64, 128, 2, 7),
    (4096, 1024, False, 8): PdlGemmConfig(64, 256, 1, 4),
    (4096, 1024, False, 16): PdlGemmConfig(64, 256, 1, 4),
    (4096, 1024, False, 32): PdlGemmConfig(64, 256, 1, 4),
    (4096, 1024, False, 64): PdlGemmConfig(64, 128, 1, 7),
    (4608, 3584, False, 8): PdlGemmConfig(64, 256, 1, 6),
    (4608, 3584, False, 16): PdlGemmConfig(64, 128, 1, 11),
    (4608, 3584, False, 64): PdlGemmConfig(64, 128, 1, 7),
    (8960, 1536, True, 8): PdlGemmConfig(32, 256, 1, 2),
    (8960, 1536, True, 16): PdlGemmConfig(32, 128, 1, 3),
    (8960, 1536, True, 32): PdlGemmConfig(32, 128, 1, 3),
    (8960, 1536, True, 64): PdlGemmConfig(32, 128, 1, 2),
    (18944, 3584, True, 8): PdlGemmConfig(32, 256, 1, 6),
    (18944, 3584, True, 16): PdlGemmConfig(32, 128, 1, 3),
    (18944, 3584, True, 64): SmallMConfig(64, 64, 0, 4, 3),
    (151936, 1024, False, 8): PdlGemmConfig(64, 128, 1, 4),
    (151936, 1024, False, 16): PdlGemmConfig(128, 128, 1, 2),
    (151936, 1024, False, 32): PdlGemmConfig(64, 128, 1, 3),
    (151936, 1024, False, 64): PdlGemmConfig(64, 128, 1, 3),
    (151936, 1536, False, 8): PdlGemmConfig(128, 128, 1, 6),
    (151936, 1536, False, 16): PdlGemmConfig(128, 128, 1, 2),
    (151936, 1536, False, 32): PdlGemmConfig(64, 128, 1, 3),
    (151936, 1536, False, 64): PdlGemmConfig(128, 128, 1, 4),
    (152064, 3584, False, 8): PdlGemmConfig(64, 256, 1, 3),
    (152064, 3584, False, 16): PdlGemmConfig(128, 128, 1, 2),
    (152064, 3584, False, 64): PdlGemmConfig(128, 128, 1, 4),
}
"""Where pdl_gemm's kernel can run: (columns, width, gated, rows of a tile) to the fastest cut, its or another's."""

SMALL_M_GEMM: dict[tuple[int, int, bool, int], SmallMConfig | None] = {
    (1024, 2048, False, 16): SmallMConfig(32, 128, 128, 4, 4),
    (1024, 2048, False, 32): SmallMConfig(16, 128, 264, 4, 9),
    (1024, 2048, False, 64): None,
    (1024, 3072, False, 16): SmallMConfig(32, 128, 256, 4, 5),
    (1024, 3072, False, 32): SmallMConfig(16, 256, 264, 4, 4),
    (1024, 3072, False, 64): SmallMConfig(32, 256, 132, 4, 4),
    (1536, 1536, False, 16): SmallMConfig(32, 128, 192, 4, 3),
    (1536, 1536, False, 32): SmallMConfig(16, 256, 0, 4, 9),
    (1536, 1536, False, 64): SmallMConfig(32, 256, 132, 4, 4),
    (1536, 8960, False, 16): SmallMConfig(32, 128, 384, 4, 4),
    (1536, 8960, False, 32): SmallMConfig(32, 256, 264, 4, 3),
    (1536, 8960, False, 64): None,
    (2048, 1536, False, 16): SmallMConfig(16, 256, 0, 4, 5),
    (2048, 1536, False, 32): SmallMConfig(16, 256, 264, 4, 4),
    (2048, 1536, False, 64): SmallMConfig(32, 256, 132, 4, 4),
    (3072, 1024, True, 16): SmallMConfig(32, 128, 0, 4, 5),
    (3072, 1024, True, 32): SmallMConfig(16, 256, 0, 4, 3),
    (3072, 1024, True, 64): SmallMConfig(32, 256, 0, 4, 3),
    (3584, 3584, False, 16): SmallMConfig(32, 128, 448, 4, 3),
    (3584, 3584, False, 32): SmallMConfig(32, 256, 0, 4, 7),
    (3584, 3584, False, 64): None,
    (3584, 18944, False, 16): SmallMConfig(64, 256, 112, 8, 4),
    (3584, 18944, False, 32): SmallMConfig(64, 256, 132, 4, 4),
    (3584, 18944, False, 64): SmallMConfig(64, 256, 132, 4, 3),
    (4096, 1024, False, 16): SmallMConfig(32, 128, 0, 4, 5),
    (4096, 1024, False, 32): SmallMConfig(16, 256, 0, 4, 3),
    (4096, 1024, False, 64): SmallMConfig(32, 256, 0, 4, 4),
    (4608, 3584, False, 16): SmallMConfig(64, 256, 0, 4, 5),
    (4608, 3584, False, 32): SmallMConfig(64, 256, 0, 4, 4),
    (4608, 3584, False, 64): SmallMConfig(64, 128, 0, 4, 7),
    (8960, 1536, True, 16): SmallMConfig(32, 128, 0, 4, 3),
    (8960, 1536, True, 32): SmallMConfig(64, 64, 0, 4, 5),
    (8960, 1536, True, 64): SmallMConfig(128, 64, 0, 8, 5),
    (18944, 3584, True, 16): SmallMConfig(32, 128, 0, 4, 3),
    (18944, 3584, True, 32): SmallMConfig(64, 64, 0, 4, 3),
    (18944, 3584, True, 64): SmallMConfig(64, 64, 0, 4, 3),
    (151936, 1024, False, 16): SmallMConfig(128, 128, 0, 4, 3),
    (151936, 1024, False, 32): SmallMConfig(128, 64, 0, 4, 3),
    (151936, 1024, False, 64): SmallMConfig(128, 64, 0, 4, 3),
    (151936, 1536, False, 16): SmallMConfig(128, 128, 0, 4, 3),
    (151936, 1536, False, 32): SmallMConfig(128, 64, 0, 4, 3),
    (151936, 1536, False, 64): SmallMConfig(128, 64, 396, 4, 3),
    (152064, 3584, False, 16): SmallMConfig(128, 128, 0, 4, 3),
    (152064, 3584, False, 32): SmallMConfig(128, 64, 0, 4, 3),
    (152064, 3584, False, 64): SmallMConfig(128, 64, 0, 4, 3),
}
"""The same elsewhere, for tiles of at least 16 rows. None: cuBLAS is faster, a norm's own kernel included."""

CONFIG_SHARED_MEMORY_BYTES = 227 << 10
"""Shared memory of a program on the GPU that the cuts were measured on: some take all of it."""
_MULTIPROCESSOR_BYTES = 228 << 10
_BESIDE_RING_BYTES = 4096
"""Of a program: barriers, and what the system takes."""


def pdl_gemm_config(rows: int, columns: int, width: int, *, gated: bool) -> PdlGemmConfig | SmallMConfig | None:
    """As `small_m_config`, where pdl_gemm's kernel can compute it."""
    token_block = token_block_of(rows)
    key = (columns, width, gated, token_block)
    return PDL_GEMM[key] if key in PDL_GEMM else _guess_ahead(token_block, columns, width, gated=gated)


def _guess_ahead(token_block: int, columns: int, width: int, *, gated: bool) -> PdlGemmConfig:
    """As many programs a multiprocessor as there are, up to three, which share its memory for rings; of more, two.

    Blocks for a third of the multiprocessors read as fast as all can; only fewer are worth splits. (31 products of
    eight models, 8 and 32 rows, on an H200: 1.3 % slower than the fastest of all cuts on average, 9 at most.)
    """
    block_n = 32 if gated else 64
    blocks = cdiv(columns, block_n)
    residents = cdiv(blocks, MULTIPROCESSORS)
    residents = residents if residents <= 3 else 2
    block_k = 256 if residents == 1 and token_block <= 32 else 128
    steps = cdiv(width, block_k)
    splits = 1 if blocks >= MULTIPROCESSORS // 3 else min(MULTIPROCESSORS // blocks, max(2, cdiv(steps, 4)), 4, steps)
    share = cdiv(steps, splits)
    return PdlGemmConfig(block_n, block_k, splits, max(2, min(stages_of(residents, 64 + token_block, block_k), share)))


def stages_of(residents: int, tile_rows: int, block_k: int) -> int:
    """Of a ring of weights and x, 16 bits a value, of which `residents` share a multiprocessor's memory."""
    return (_MULTIPROCESSOR_BYTES // residents - _BESIDE_RING_BYTES) // (tile_rows * block_k * 2)


def small_m_config(rows: int, columns: int, width: int, dtype: torch.dtype, *, gated: bool) -> SmallMConfig | None:
    """The stored cut, or a guess that keeps every multiprocessor reading; None: leave it to cuBLAS."""
    row_block = row_block_of(rows)
    if dtype == torch.float32:  # without matrix units: larger tiles do not fit the registers
        return SmallMConfig(16, 32, programs=528, warps=4, stages=3) if row_block == SMALL_M else None
    key = (columns, width, gated, row_block)
    return SMALL_M_GEMM[key] if key in SMALL_M_GEMM else _guess(row_block, columns, gated=gated)


def _guess(row_block: int, columns: int, *, gated: bool) -> SmallMConfig:
    """Two programs a multiprocessor of an H100 or H200, of few rows four; blocks about as tall as x or taller."""
    if row_block == SMALL_M:
        return SmallMConfig(32 if columns <= 16384 else 64, 128, programs=528, warps=4, stages=4)
    block_n = 64 if row_block <= 32 or gated else 128
    weight_rows = block_n * (2 if gated else 1)
    block_k = 128 if weight_rows + row_block <= 96 else 64
    # As much shared memory as lets two programs stay on a multiprocessor.
    stages = 112_000 // ((weight_rows + row_block) * block_k * 2)
    return SmallMConfig(block_n, block_k, programs=264, warps=4, stages=stages)
