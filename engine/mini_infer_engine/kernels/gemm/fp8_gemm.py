"""GEMM with FP8 weights that are widened in registers (W8A16): half the bytes of bf16, the same activations.

Weights are scaled by row and by block of K: the scale multiplies a block's sum, not its weights.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["M"])
def _fp8_gemm(
    x,
    weight,
    scale,
    bias,
    out,
    M,
    N,
    K,
    x_stride,
    out_stride,
    scale_stride,
    scale_block,
    BIAS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of N, block of M). ONE_SCALE: a scale is of a whole row, and is multiplied with at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n_inside = n < N
    sources = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    rows = weight + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        values = tl.load(sources + start, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        weights = tl.load(rows + start, mask=inside[:, None] & n_inside[None, :], other=0.0).to(values.dtype)
        if ONE_SCALE:
            acc = tl.dot(values, weights, acc, input_precision=PRECISION)
        else:
            scales = tl.load(scale + n * scale_stride + start // scale_block, mask=n_inside, other=0.0)
            acc += tl.dot(values, weights, input_precision=PRECISION) * scales[None, :]
    if ONE_SCALE:
        acc *= tl.load(scale + n * scale_stride, mask=n_inside, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    stored = (m < M)[:, None] & n_inside[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], acc.to(out.dtype.element_ty), mask=stored)


def fp8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    scale_block: int,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """X [M, K] @ (weight [N, K] in fp8 * scale).T + bias, in x's dtype.

    scale is [N, blocks of K] fp32, each for `scale_block` columns, a multiple of 32 unless there is one block.
    """
    m, k = x.shape
    n = weight.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not m:
        return out
    one_scale = scale.shape[1] == 1
    block_m = min(128, max(16, next_power_of_2(m)))
    block_n = 32 if block_m <= 32 else 64 if block_m <= 64 else 128
    block_k = 128 if block_m <= 64 and x.dtype != torch.float32 else 64 if x.dtype != torch.float32 else 32
    if not one_scale:
        while scale_block % block_k:  # a step of K has one scale
            block_k //= 2
    _fp8_gemm[(cdiv(n, block_n), cdiv(m, block_m))](
        x,
        weight,
        scale,
        bias,
        out,
        m,
        n,
        k,
        x.stride(0),
        out.stride(0),
        scale.stride(0),
        scale_block,
        BIAS=bias is not None,
        ONE_SCALE=one_scale,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4 if block_m <= 64 else 8,
        num_stages=4 if block_m <= 64 and x.dtype != torch.float32 else 3,
    )
    return out
