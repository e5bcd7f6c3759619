"""Split-K GEMM of many rows by cuBLAS, for outputs of too few tiles for all SMs (`gemm_rules.k_splits` decides)."""

import torch


def split_k_gemm(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """Returns the product of x [M, K] and weight [N, K].T as summands [splits, M, N], one for each split of K.

    The kernel that reads them adds them up. (If cuBLAS itself splits K, it adds in a kernel of its own or one split
    after another.)
    """
    split_k = (splits, weight.shape[1] // splits)
    return torch.bmm(x.unflatten(1, split_k).transpose(0, 1), weight.unflatten(1, split_k).permute(1, 2, 0))
