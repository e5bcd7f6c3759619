"""Grouped GEMM for experts of many tokens (Gale et al. 2022, MegaBlocks, arXiv 2211.15841).

A tile consists of tokens that share an expert. The number of tokens per expert is known only on the device. The grid
therefore has the largest possible number of tiles, and each program finds its expert from the counts; programs beyond
the last tile end at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.grouped_weight_gemm import expert_operands, widened_tile
from mini_infer_engine.kernels.moe.expert_tiles import ExpertTiles, Tile
from mini_infer_engine.kernels.moe.gated import gated
from mini_infer_engine.kernels.moe.route import Routing
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def tile_of(counts, tile, NUM_EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns (expert, first row within it, its rows) of a tile; rows are 0 if there is no such tile."""
    experts = tl.arange(0, EXPERTS_BLOCK)
    rows = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    is_mine = experts == expert
    first = tile - tl.sum(tl.where(is_mine, ends - tiles, 0), axis=0)
    return expert, first * BLOCK_M, tl.sum(tl.where(is_mine, rows, 0), axis=0)


@triton.jit(do_not_specialize=["tokens"])
def _grouped(
    x,
    weight,
    scales,
    zeros,
    factors,
    bias,
    counts,
    pairs,
    weights,
    out,
    tokens,
    K,
    N,
    row_bytes,
    groups,
    x_stride,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
):
    """Grouped GEMM: one program per (block of N, tile).

    GATED: `gated` of x @ gate.T and x @ up.T for rows x[token]; else routing weight * rows. A block of gate and up is
    one tile of 2 * BLOCK_N rows of the weight that alternate, so that one product of the tensor cores is as wide as
    possible, and the two results of a column meet in one thread. EVEN: N and K are multiples of their blocks. Rows of x
    beyond the last are masked nevertheless: otherwise every program would read one line.
    """
    expert, first, rows = tile_of(counts, tl.program_id(1), NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if rows == 0:
        return
    m = first + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    has_row = m < rows
    pair = tl.load(pairs + expert.to(tl.int64) * tokens + m, mask=has_row, other=0)
    sources = x + (pair // TOP_K if GATED else pair).to(tl.int64)[:, None] * x_stride + k[None, :]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        column = tl.arange(0, 2 * BLOCK_N)
        inner = tl.program_id(0) * BLOCK_N + column // 2
        row = expert.to(tl.int64) * (2 * N) + (inner + column % 2 * N).to(tl.int64)
    else:
        inner = n
        row = expert.to(tl.int64) * N + n.to(tl.int64)
    columns = weight + row[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, row.shape[0]), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            values = tl.load(sources + start, mask=has_row[:, None], other=0.0)
        else:
            values = tl.load(sources + start, mask=has_row[:, None] & (start + k < K)[None, :], other=0.0)
        if KIND != "plain":
            tile = widened_tile(
                weight, scales, zeros, row, inner < N, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K
            )
            tile = tl.trans(tile).to(values.dtype)
        elif EVEN:
            tile = tl.load(columns + start)
        else:
            tile = tl.load(columns + start, mask=(start + k < K)[:, None] & (inner < N)[None, :], other=0.0)
        acc = tl.dot(values, tile, acc, input_precision=PRECISION)
    if factors is not None:
        acc *= tl.load(factors + row, mask=inner < N, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + row, mask=inner < N, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (BLOCK_M, BLOCK_N, 2)))
        result = gated(gate, up, out.dtype.element_ty, LIMIT, GELU)
        place = pair.to(tl.int64)
    else:
        result *= tl.load(weights + pair, mask=has_row, other=0.0)[:, None]
        place = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    stored = has_row[:, None] & (n < N)[None, :]
    tl.store(out + place[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=stored)


def grouped_experts(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor | GroupedWeight,
    down: torch.Tensor | GroupedWeight,
    tiles: ExpertTiles,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """Computes the result of `expert_gemv` with tokens grouped by expert; `routing` lists each expert's tokens."""
    tokens, hidden = x.shape
    top_k, width = routing.experts.shape[1], down.shape[-1]
    between = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    make_out = torch.zeros if routing.is_local else torch.empty  # no tile writes what experts elsewhere make
    out = make_out((top_k, tokens, hidden), dtype=x.dtype, device=x.device)
    height, limit = tiles.height, swiglu_limit or 0.0
    options: dict[str, Any] = {"bias": gate_up_bias, "limit": limit, "gelu": gelu}
    grouped_product(x, routing, gate_up, between, height, tiles.gated, is_gated=True, **options)
    grouped_product(between, routing, down, out, height, tiles.down, is_gated=False, bias=down_bias)
    return out


def grouped_product(
    x: torch.Tensor,
    routing: Routing,
    weight: torch.Tensor | GroupedWeight,
    out: torch.Tensor,
    block_m: int,
    tile: Tile,
    *,
    is_gated: bool,
    bias: torch.Tensor | None = None,
    limit: float = 0.0,
    gelu: bool = False,
) -> None:
    """Computes one of the two products into `out`.

    The first maps x's rows to [tokens * top_k, width], the second maps these to [top_k, tokens, hidden].
    """
    num_experts, (tokens, top_k) = routing.counts.shape[0], routing.experts.shape
    k, n = x.shape[1], out.shape[-1]
    parts, sizes, form = expert_operands(weight)
    tiles = min(tokens * top_k, num_experts + tokens * top_k // block_m)
    _grouped[(cdiv(n, tile.block_n), tiles)](
        x,
        *parts,
        bias,
        routing.counts,
        routing.pairs,
        routing.weights,
        out,
        tokens,
        k,
        n,
        *sizes,
        x.stride(0),
        TOP_K=top_k,
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=next_power_of_2(num_experts),
        GATED=is_gated,
        EVEN=n % tile.block_n == 0 and k % tile.block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        LIMIT=limit,
        GELU=gelu,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **form,
    )
