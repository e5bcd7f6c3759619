"""Products of many rows by cuBLAS in shares of K, where the output has too few tiles for all multiprocessors."""

import torch

from mini_infer_engine.kernels.gemm.gemm_config import MAX_M
from mini_infer_engine.kernels.sizes import MULTIPROCESSORS, cdiv

SPLITS = (4, 2)
"""Beside 1."""
_TILE = 128
"""Rows and columns of what cuBLAS computes together, more or less."""
_LEAST_SHARE = 512
"""Of the width."""


def k_splits(rows: int, columns: int, width: int) -> int:
    """In how many shares of the width a product is computed fastest, by what an H200 took; 1: as a whole."""
    if rows <= MAX_M:
        return 1  # only where our own products cannot run, and nothing was measured there
    tiles = cdiv(rows, _TILE) * cdiv(columns, _TILE)
    turns_and_a_half = MULTIPROCESSORS < tiles <= 1.5 * MULTIPROCESSORS  # which would take two
    for splits, suit in zip(SPLITS, (tiles <= 40, tiles <= 84 or turns_and_a_half), strict=True):
        share, rest = divmod(width, splits)
        least = _LEAST_SHARE if tiles * splits <= MULTIPROCESSORS else 2 * _LEAST_SHARE
        if suit and share >= least and not rest and not share % 8:
            return splits
    return 1


def split_k_gemm(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """The product of x [rows, width] and weight [columns, width].T as summands [splits, rows, columns].

    Whoever reads them adds them up: cuBLAS, where it splits by itself, does so in a kernel of its own or in turns.
    """
    shares = (splits, weight.shape[1] // splits)
    return torch.bmm(x.unflatten(1, shares).transpose(0, 1), weight.unflatten(1, shares).permute(1, 2, 0))
