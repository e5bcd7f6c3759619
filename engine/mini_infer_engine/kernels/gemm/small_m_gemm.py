"""Split-K GEMM for M <= 16: x [M, K] is the left operand of the tensor cores, and weights are loaded through registers.

So small a GEMM lasts 5 to 12 us, so that latency from launch to end counts: it has no TMA descriptors, and no program
works on two output tiles. (The four GEMMs of a layer of Qwen3-0.6B on an H200: 22.7 us, by stream_k_gemm 27.3.)
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.gemm_config import SMALL_M, SmallMConfig
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace


@triton.jit(do_not_specialize=["M"])
def _small_m_gemm(
    x,
    weight,
    bias,
    residual,
    square_sums,
    next_norm,
    out,
    scaled,
    next_square_sums,
    partials,
    counters,
    M,
    N,
    K,
    x_stride,
    parts,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    NEXT_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Split-K: one program per (tile of N, split of K).

    The split that arrives last adds all partial sums and runs the epilogue.
    """
    tile_n = tl.program_id(0)
    split = tl.program_id(1)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    mask_n = offs_n < N
    mask_m = offs_m < M
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    weight_at = weight + offs_n.to(tl.int64)[:, None] * K
    up_at = weight_at + N.to(tl.int64) * K
    split_k = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first_k = split * split_k
    # Operands of the epilogue are loaded before the long wait for weights.
    out_mask = mask_m[:, None] & mask_n[None, :]
    out_at = offs_m[:, None] * N + offs_n[None, :]
    if PARTS > 0:
        part = tl.arange(0, PARTS)
        squares_at = square_sums + part[:, None] * BLOCK_M + offs_m[None, :]
        squares = tl.load(squares_at, mask=(part < parts)[:, None], other=0.0)
    if BIAS:
        bias_values = tl.load(bias + offs_n, mask=mask_n, other=0.0)
    if RESIDUAL:
        residual_values = tl.load(residual + out_at, mask=out_mask, other=0.0)
    for start_k in range(first_k, tl.minimum(first_k + split_k, K), BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        x_mask = mask_m[:, None] if EVEN_K else mask_m[:, None] & mask_k[None, :]
        x_tile = tl.load(x + offs_m[:, None] * x_stride + offs_k[None, :], mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:
            weight_tile = tl.load(weight_at + offs_k[None, :])
        else:
            weight_tile = tl.load(weight_at + offs_k[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        acc = tl.dot(x_tile, tl.trans(weight_tile), acc, input_precision=PRECISION)
        if GATED:
            if EVEN_K and EVEN_N:
                weight_tile = tl.load(up_at + offs_k[None, :])
            else:
                weight_tile = tl.load(up_at + offs_k[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0)
            acc_up = tl.dot(x_tile, tl.trans(weight_tile), acc_up, input_precision=PRECISION)

    is_last = True
    if SPLIT_K > 1:
        partial_offsets = offs_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own_partials = partials + (tile_n * SPLIT_K + split) * BLOCK_M * BLOCK_N
        tl.store(own_partials + partial_offsets, acc)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile_n, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            # In a fixed order, whichever split is last, so that results repeat bit for bit.
            for other in tl.static_range(SPLIT_K):
                other_partials = partials + (tile_n * SPLIT_K + other) * BLOCK_M * BLOCK_N
                acc += tl.load(other_partials + partial_offsets, cache_modifier=".cg")
            tl.store(counters + tile_n, 0)
    if is_last:
        if PARTS > 0:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[:, None]
            acc = acc * scale
            acc_up = acc_up * scale
        if BIAS:
            acc += bias_values.to(tl.float32)[None, :]
        if GATED:
            acc = acc * tl.sigmoid(acc) * acc_up
        if RESIDUAL:
            acc += residual_values.to(tl.float32)
        result = acc.to(out.dtype.element_ty)
        tl.store(out + out_at, result, mask=out_mask)
        if NEXT_NORM:
            rounded = tl.where(out_mask, result.to(tl.float32), 0.0)
            norms = tl.load(next_norm + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
            tl.store(scaled + out_at, (rounded * norms).to(result.dtype), mask=out_mask)
            tl.store(next_square_sums + tile_n * BLOCK_M + offs_m, tl.sum(rounded * rounded, axis=1))


def launch_small_m_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epilogue: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int, int],
    norm: tuple[int, float],
    config: SmallMConfig,
    options: dict[str, Any],
    workspace: Workspace,
) -> None:
    """Launches the kernel with `launch_stream_k_gemm`'s arguments, for M <= SMALL_M.

    A gated GEMM is not split: its sums would be twice as many.
    """
    _, n, k = sizes
    tiles, k_steps = cdiv(n, config.block_n), cdiv(k, config.block_k)
    splits = 1 if options["GATED"] else max(1, min(config.programs // tiles, k_steps))
    assert splits == 1 or tiles <= COUNTERS
    partial_floats = tiles * splits * SMALL_M * config.block_n if splits > 1 else 0
    _small_m_gemm[(tiles, splits)](
        x,
        weight,
        *epilogue,
        workspace.partials(partial_floats),
        workspace.counters,
        *sizes,
        x.stride(0),
        *norm,
        SPLIT_K=splits,
        EVEN_N=n % config.block_n == 0,
        EVEN_K=k % config.block_k == 0,
        **options,
    )
