"""Experts of many tokens: grouped GEMM, tiles of tokens that share an expert (Gale et al. 2022, MegaBlocks,
arXiv 2211.15841). How many tokens an expert has is known on the device only: the grid holds the most tiles that there
may be, and each program finds its expert from the counts; those beyond the last tile end at once.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.grouped_weight_gemm import expert_operands, widened_tile
from mini_infer_engine.kernels.moe.moe_config import GroupedGemmConfig
from mini_infer_engine.kernels.moe.route import Routing
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def _tile_of(counts, tile, NUM_EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row within it, its rows) of a tile; rows 0 where there is no such tile."""
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of N, tile). GATED: silu(x @ gate.T) * (x @ up.T) of rows x[token]; else routing weight * rows."""
    expert, first, rows = _tile_of(counts, tl.program_id(1), NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if rows == 0:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    pair = tl.load(pairs + expert.to(tl.int64) * tokens + m, mask=m < rows, other=0)
    source_row = pair // TOP_K if GATED else pair
    sources = x + source_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_rows = 2 * N if GATED else N
    row = expert.to(tl.int64) * weight_rows + n.to(tl.int64)
    columns = weight + row[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        values = tl.load(sources + start, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        if KIND == "plain":
            mask = inside[:, None] & (n < N)[None, :]
            acc = tl.dot(values, tl.load(columns + start, mask=mask, other=0.0), acc, input_precision=PRECISION)
            if GATED:
                up = tl.load(columns + N.to(tl.int64) * K + start, mask=mask, other=0.0)
                up_acc = tl.dot(values, up, up_acc, input_precision=PRECISION)
        else:
            tile = widened_tile(weight, scales, zeros, row, n < N, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K)
            acc = tl.dot(values, tl.trans(tile).to(values.dtype), acc, input_precision=PRECISION)
            if GATED:
                tile = widened_tile(
                    weight, scales, zeros, row + N, n < N, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K
                )  # fmt: skip
                up_acc = tl.dot(values, tl.trans(tile).to(values.dtype), up_acc, input_precision=PRECISION)
    if factors is not None:
        acc *= tl.load(factors + row, mask=n < N, other=0.0)[None, :]
        if GATED:
            up_acc *= tl.load(factors + row + N, mask=n < N, other=0.0)[None, :]
    result = acc.to(out.dtype.element_ty).to(tl.float32)
    if GATED:
        gate = (result / (1.0 + tl.exp(-result))).to(out.dtype.element_ty).to(tl.float32)
        result = gate * up_acc.to(out.dtype.element_ty).to(tl.float32)
        place = pair.to(tl.int64)
    else:
        result *= tl.load(weights + pair, mask=m < rows, other=0.0)[:, None]
        place = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    stored = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out + place[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=stored)


def grouped_experts(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor | GroupedWeight,
    down: torch.Tensor | GroupedWeight,
    config: GroupedGemmConfig,
) -> torch.Tensor:
    """As `expert_gemv`, with tokens grouped by expert; `routing` lists each expert's tokens."""
    tokens, hidden = x.shape
    num_experts, top_k, width = routing.counts.shape[0], routing.experts.shape[1], down.shape[-1]
    pairs = tokens * top_k
    gated = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    make_out = torch.zeros if routing.is_local else torch.empty  # no tile writes what experts elsewhere make
    out = make_out((top_k, tokens, hidden), dtype=x.dtype, device=x.device)
    tiles = min(pairs, num_experts + pairs // config.block_m)
    options = {
        "TOP_K": top_k,
        "NUM_EXPERTS": num_experts,
        "EXPERTS_BLOCK": next_power_of_2(num_experts),
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    common = (routing.counts, routing.pairs, routing.weights)
    parts, sizes, form = expert_operands(gate_up)
    _grouped[(cdiv(width, config.gated_block_n), tiles)](
        x,
        *parts,
        *common,
        gated,
        tokens,
        hidden,
        width,
        *sizes,
        x.stride(0),
        GATED=True,
        BLOCK_N=config.gated_block_n,
        **form,
        **options,
    )
    parts, sizes, form = expert_operands(down)
    _grouped[(cdiv(hidden, config.block_n), tiles)](
        gated,
        *parts,
        *common,
        out,
        tokens,
        width,
        hidden,
        *sizes,
        width,
        GATED=False,
        BLOCK_N=config.block_n,
        **form,
        **options,
    )
    return out
