"""The product of at most sixteen rows: x is the left operand, which they fill, and weights come through registers.

With so few rows a product lasts 5 to 12 us, and what counts is a short way from its begin to its end: no descriptors,
no shares that cross blocks. (Qwen3-0.6B, a layer's four products, H200: 22.7 us, by stream_k_gemm 27.3.)
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.gemm_config import SMALL_M, SmallMConfig
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace


@triton.jit(do_not_specialize=["rows"])
def _few_rows_linear(
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
    rows,
    columns,
    width,
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
    """Program (column block, split of the width). The split that arrives last adds the others' sums and finishes."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    n_inside = n < columns
    m_inside = m < rows
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    weight_rows = weight + n.to(tl.int64)[:, None] * width
    up_rows = weight_rows + columns.to(tl.int64) * width
    width_of_split = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLIT_K) * BLOCK_K
    first = split * width_of_split
    # What the end needs is asked for before the long wait for weights.
    out_mask = m_inside[:, None] & n_inside[None, :]
    out_at = m[:, None] * columns + n[None, :]
    if PARTS > 0:
        part = tl.arange(0, PARTS)
        squares_at = square_sums + part[:, None] * BLOCK_M + m[None, :]
        squares = tl.load(squares_at, mask=(part < parts)[:, None], other=0.0)
    if BIAS:
        added = tl.load(bias + n, mask=n_inside, other=0.0)
    if RESIDUAL:
        before = tl.load(residual + out_at, mask=out_mask, other=0.0)
    for start in range(first, tl.minimum(first + width_of_split, width), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_inside = k < width
        x_mask = m_inside[:, None] if EVEN_K else m_inside[:, None] & k_inside[None, :]
        values = tl.load(x + m[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:
            tile = tl.load(weight_rows + k[None, :])
        else:
            tile = tl.load(weight_rows + k[None, :], mask=n_inside[:, None] & k_inside[None, :], other=0.0)
        total = tl.dot(values, tl.trans(tile), total, input_precision=PRECISION)
        if GATED:
            if EVEN_K and EVEN_N:
                tile = tl.load(up_rows + k[None, :])
            else:
                tile = tl.load(up_rows + k[None, :], mask=n_inside[:, None] & k_inside[None, :], other=0.0)
            total_up = tl.dot(values, tl.trans(tile), total_up, input_precision=PRECISION)

    last = True
    if SPLIT_K > 1:
        tile_of = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partials + (block * SPLIT_K + split) * BLOCK_M * BLOCK_N
        tl.store(mine + tile_of, total)
        tl.debug_barrier()
        last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            # In the same order whoever is last, so that results repeat bit for bit.
            for other in tl.static_range(SPLIT_K):
                theirs = partials + (block * SPLIT_K + other) * BLOCK_M * BLOCK_N
                total += tl.load(theirs + tile_of, cache_modifier=".cg")
            tl.store(counters + block, 0)
    if last:
        if PARTS > 0:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)[:, None]
            total = total * scale
            total_up = total_up * scale
        if BIAS:
            total += added.to(tl.float32)[None, :]
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        if RESIDUAL:
            total += before.to(tl.float32)
        result = total.to(out.dtype.element_ty)
        tl.store(out + out_at, result, mask=out_mask)
        if NEXT_NORM:
            rounded = tl.where(out_mask, result.to(tl.float32), 0.0)
            norms = tl.load(next_norm + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
            tl.store(scaled + out_at, (rounded * norms).to(result.dtype), mask=out_mask)
            tl.store(next_square_sums + block * BLOCK_M + m, tl.sum(rounded * rounded, axis=1))


def launch_small_m_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int, int],
    norm: tuple[int, float],
    config: SmallMConfig,
    options: dict[str, Any],
    workspace: Workspace,
) -> None:
    """As `launch_stream_k_gemm`, for rows <= SMALL_M. A gated product is not split: its sums would be twice as many."""
    _, columns, width = sizes
    blocks, steps = cdiv(columns, config.block_n), cdiv(width, config.block_k)
    splits = 1 if options["GATED"] else max(1, min(config.programs // blocks, steps))
    assert splits == 1 or blocks <= COUNTERS
    partial_floats = blocks * splits * SMALL_M * config.block_n if splits > 1 else 0
    _few_rows_linear[(blocks, splits)](
        x,
        weight,
        *ends,
        workspace.partials(partial_floats),
        workspace.counters,
        *sizes,
        x.stride(0),
        *norm,
        SPLIT_K=splits,
        EVEN_N=columns % config.block_n == 0,
        EVEN_K=width % config.block_k == 0,
        **options,
    )
