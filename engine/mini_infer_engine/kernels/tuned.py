"""How skinny products are cut, by shape: measured on an H200 by benchmarks/gpu_kernels.py, stored for a quick start."""

import torch

from mini_infer_engine.kernels.skinny_linear import SkinnyConfig, row_block_of

SKINNY: dict[tuple[int, int, bool, int], SkinnyConfig | None] = {}
"""(columns, width, gated, rows of a tile) to the fastest cut; None: cuBLAS is faster, a norm's own kernel included."""


def skinny_config(rows: int, columns: int, width: int, dtype: torch.dtype, *, gated: bool) -> SkinnyConfig | None:
    """The stored cut, or a guess that keeps every multiprocessor reading; None: leave it to cuBLAS."""
    row_block = row_block_of(rows)
    if dtype == torch.float32:  # without matrix units: larger tiles do not fit the registers
        return SkinnyConfig(16, 32, programs=528, warps=4, stages=3) if row_block == 16 else None
    key = (columns, width, gated, row_block)
    return SKINNY[key] if key in SKINNY else _guess(row_block, gated=gated)


def _guess(row_block: int, *, gated: bool) -> SkinnyConfig:
    """Two programs a multiprocessor of an H100 or H200; blocks about as tall as x or taller, since each reads all x."""
    block_n = 64 if row_block <= 32 or gated else 128
    weight_rows = block_n * (2 if gated else 1)
    block_k = 128 if weight_rows + row_block <= 96 else 64
    stages = 112_000 // ((weight_rows + row_block) * block_k * 2)
    return SkinnyConfig(block_n, block_k, programs=264, warps=4, stages=stages)
