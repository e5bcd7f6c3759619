"""Launch configs of experts' grouped GEMM, by sizes alone. Does not need Triton."""

from dataclasses import dataclass

import torch

TILE_ROWS = (16, 32, 64, 128)
"""Heights of a tile of tokens."""


@dataclass(frozen=True, slots=True)
class GroupedGemmConfig:
    """Tiles of tokens that share an expert, by columns of its weights."""

    block_m: int
    block_n: int
    gated_block_n: int
    """Of the product of gate and up, which has two accumulators."""
    block_k: int
    warps: int
    stages: int


def grouped_gemm_config(block_m: int, dtype: torch.dtype) -> GroupedGemmConfig:
    """Of tiles of this height. In fp32, without tensor cores, larger ones do not fit the registers."""
    warps = 8 if block_m == 128 else 4
    if dtype == torch.float32:
        return GroupedGemmConfig(block_m, block_n=32, gated_block_n=32, block_k=32, warps=warps, stages=2)
    return GroupedGemmConfig(
        block_m, block_n=64 if block_m <= 32 else 128, gated_block_n=64, block_k=64, warps=warps, stages=3
    )


def tile_rows(mean_rows: float) -> int:
    """The height for experts that have so many tokens on average: about as tall as these, or waste is most of it."""
    return next((rows for rows in TILE_ROWS[:-1] if mean_rows <= 1.5 * rows), TILE_ROWS[-1])
