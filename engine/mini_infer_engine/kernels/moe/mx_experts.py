"""Experts in MXFP4 (OCP Microscaling Formats 1.0) for Hopper: wgmma's left operand are weights, widened in registers.

`mx_widen` widens them to columns in x's order without moving a value to another thread, so that one product reads a
whole step: while wgmma multiplies its first columns, the others are widened.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.mx_order import FACTOR_OF_SCALE, GROUP_WORDS, VALUE_UNIT
from mini_infer_engine.kernels.moe.gated import gated
from mini_infer_engine.kernels.moe.grouped_gemm import tile_of
from mini_infer_engine.kernels.moe.mx_widen import widened_words
from mini_infer_engine.kernels.moe.route import Routing
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_WORDS: tl.constexpr = tl.constexpr(GROUP_WORDS)
_UNIT: tl.constexpr = tl.constexpr(VALUE_UNIT / FACTOR_OF_SCALE)


@dataclass(frozen=True, slots=True)
class MXTile:
    """The tile of one program: rows of the weight (gate and up together), words of a row in a step, and stages."""

    rows: int
    words: int
    num_warps: int
    num_stages: int


@triton.jit
def _mx_experts(
    x,
    values,
    scales,
    bias,
    counts,
    pairs,
    experts,
    weights,
    out,
    tokens,
    N,
    row_words,
    groups,
    x_stride,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    EACH_PAIR: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
):
    """Grouped GEMM with weights on the left: one program per (block of BLOCK_N rows of the weight, tile of tokens).

    GATED: `gated` of x @ gate.T and x @ up.T for rows x[token]; rows of gate and up alternate in a block. Else routing
    weight * rows. EACH_PAIR: a tile is one (token, expert) pair; else as in `grouped_gemm`.
    """
    if EACH_PAIR:
        expert = tl.load(experts + tl.program_id(1))
        if expert < 0:  # another rank's: `out` is zero
            return
        has_row = tl.arange(0, BLOCK_M) == 0
        pair = tl.zeros((BLOCK_M,), tl.int32) + tl.program_id(1)
    else:
        expert, first, rows = tile_of(counts, tl.program_id(1), NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
        if rows == 0:
            return
        m = first + tl.arange(0, BLOCK_M)
        has_row = m < rows
        pair = tl.load(pairs + expert.to(tl.int64) * tokens + m, mask=has_row, other=0)
    word = tl.arange(0, BLOCK_WORDS)
    group = tl.arange(0, BLOCK_WORDS // _WORDS)
    k = tl.arange(0, 4 * BLOCK_WORDS)
    sources = x + (pair // TOP_K if GATED else pair).to(tl.int64)[:, None] * x_stride + k[None, :]
    number = tl.arange(0, BLOCK_N)
    # One block: without a loop around it ptxas lets wgmma of some tiles not run beside other instructions.
    for block in tl.range(tl.program_id(0), tl.cdiv(2 * N if GATED else N, BLOCK_N), tl.num_programs(0)):
        if GATED:
            column = block * (BLOCK_N // 2) + number // 2
            row = expert.to(tl.int64) * (2 * N) + (column + number % 2 * N).to(tl.int64)
        else:
            column = block * BLOCK_N + number
            row = expert.to(tl.int64) * N + column.to(tl.int64)
        inside = column < N
        values_at = values + row[:, None] * row_words + word[None, :]
        scales_at = scales + row[:, None] * groups + group[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in range(0, row_words, BLOCK_WORDS):
            in_row = word < row_words - start
            packed = tl.load(values_at + start, mask=inside[:, None] & in_row[None, :], other=0)
            in_groups = group < groups - start // _WORDS
            factors = tl.load(scales_at + start // _WORDS, mask=inside[:, None] & in_groups[None, :], other=0.0)
            of_x = has_row[:, None] & (k < 4 * (row_words - start))[None, :]
            columns = tl.load(sources + 4 * start, mask=of_x, other=0.0)
            acc = tl.dot(widened_words(packed, factors, BLOCK_N, BLOCK_WORDS), tl.trans(columns), acc)
        acc *= _UNIT
        if bias is not None:
            acc += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        result = tl.trans(acc).to(out.dtype.element_ty).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.reshape(result, (BLOCK_M, BLOCK_N // 2, 2)))
            result = gated(gate, up, out.dtype.element_ty, LIMIT, GELU)
            place = pair.to(tl.int64)
            column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        else:
            result *= tl.load(weights + pair, mask=has_row, other=0.0)[:, None]
            place = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
        stored = has_row[:, None] & (column < N)[None, :]
        tl.store(out + place[:, None] * N + column[None, :], result.to(out.dtype.element_ty), mask=stored)


def mx_product(
    x: Tensor,
    routing: Routing,
    weight: GroupedWeight,
    out: Tensor,
    height: int,
    tile: MXTile,
    *,
    is_gated: bool,
    bias: Tensor | None = None,
    limit: float = 0.0,
    gelu: bool = False,
) -> None:
    """Computes one of the two products of experts into `out`, as `grouped_gemm.grouped_product` does.

    Tiles have `height` tokens. A routing without lists of tokens has one tile for each pair.
    """
    (tokens, top_k), num_experts = routing.experts.shape, routing.counts.shape[0]
    pairs, n = tokens * top_k, out.shape[-1]
    tiles = min(pairs, num_experts + pairs // height) if num_experts else pairs
    _mx_experts[(cdiv(n * (1 + is_gated), tile.rows), tiles)](
        x,
        weight.values.view(torch.int16),
        weight.scales,
        bias,
        routing.counts,
        routing.pairs,
        routing.experts,
        routing.weights,
        out,
        tokens,
        n,
        weight.values.shape[-1] // 2,
        weight.scales.shape[-1],
        x.stride(0),
        TOP_K=top_k,
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=next_power_of_2(max(1, num_experts)),
        EACH_PAIR=num_experts == 0,
        GATED=is_gated,
        BLOCK_M=height,
        BLOCK_N=tile.rows,
        BLOCK_WORDS=tile.words,
        LIMIT=limit,
        GELU=gelu,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def mx_experts(
    x: Tensor,
    routing: Routing,
    gate_up: GroupedWeight,
    down: GroupedWeight,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    swiglu_limit: float | None = None,
    gelu: bool = False,
) -> Tensor:
    """Computes the result of `expert_gemv` for x [tokens, hidden] in bf16 and stacks in the order of `mx_ordered`.

    `routing` lists each expert's tokens, or has no lists: then weights are read once for each (token, expert) pair.
    """
    tokens, hidden = x.shape
    top_k, width = routing.experts.shape[1], down.shape[-1]
    mean_rows = tokens * top_k / max(1, gate_up.values.shape[0]) if routing.counts.shape[0] else 1.0
    height, tile = mx_tile(mean_rows)
    between = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    make_out = torch.zeros if routing.is_local else torch.empty  # no tile writes what experts elsewhere make
    out = make_out((top_k, tokens, hidden), dtype=x.dtype, device=x.device)
    activation: dict[str, Any] = {"limit": swiglu_limit or 0.0, "gelu": gelu}
    mx_product(x, routing, gate_up, between, height, tile, is_gated=True, bias=gate_up_bias, **activation)
    mx_product(between, routing, down, out, height, tile, is_gated=False, bias=down_bias)
    return out


_TILES = {
    16: MXTile(64, 64, 4, 3),
    32: MXTile(128, 32, 4, 3),
    64: MXTile(64, 32, 4, 3),
    128: MXTile(128, 32, 8, 3),
    256: MXTile(128, 16, 8, 3),
}
"""Tiles of both products by tokens in a tile: near the best for gpt-oss-20b's experts on an H200 at every batch."""
_MEAN_ROWS = {16: 10, 32: 20, 64: 96, 128: 256}
"""The largest mean number of tokens per expert for each height but the last."""


def mx_tile(mean_rows: float) -> tuple[int, MXTile]:
    """Returns the tokens of a tile, and the tile of both products, for experts with this mean number of tokens."""
    height = next((height for height, most in _MEAN_ROWS.items() if mean_rows <= most), max(_TILES))
    return height, _TILES[height]
