"""Experts in MXFP4 (OCP Microscaling Formats 1.0) for Hopper: wgmma's left operand are weights, widened in registers.

`mx_widen` widens them to columns in x's order without moving a value to another thread, so that one product reads a
whole step: while wgmma multiplies its first columns, the others are widened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer_engine.kernels.device import device_profile
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
    short: int = 0
    """An expert's last tile with no more tokens than these is computed as a tile of so many; 0: as any other."""


@triton.jit
def _tile_product(
    x,
    values,
    scales,
    bias,
    pairs,
    weights,
    out,
    expert,
    first,
    rows,
    tokens,
    N,
    row_words,
    x_stride,
    TOP_K: tl.constexpr,
    EACH_PAIR: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
):
    """Computes blocks of BLOCK_N rows of an expert's weight for BLOCK_M of its tokens from the first on."""
    m = first + tl.arange(0, BLOCK_M)
    has_row = m < rows
    if EACH_PAIR:
        pair = m + tl.program_id(1)
    else:
        pair = tl.load(pairs + expert.to(tl.int64) * tokens + m, mask=has_row, other=0)
    parts: tl.constexpr = max(1, 32 // BLOCK_WORDS)  # of a block of 128 columns
    blocks: tl.constexpr = max(1, BLOCK_WORDS // 32)
    steps = (row_words + 31) // 32
    word = tl.arange(0, BLOCK_WORDS)
    group = tl.arange(0, parts * BLOCK_WORDS // _WORDS)
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
        block_of_row = row // 8 * steps
        values_at = values + (block_of_row * 256 + row % 8 * 32)[:, None] + (word // 32 * 256 + word % 32)[None, :]
        scales_at = scales + (block_of_row * 32 + row % 8 * 4)[:, None] + (group // 4 * 32 + group % 4)[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for step in range(tl.cdiv(row_words, BLOCK_WORDS)):
            start = step * BLOCK_WORDS
            is_value = inside[:, None]
            is_factor = inside[:, None]
            if blocks > 1:  # a row is padded to whole blocks
                is_value = is_value & (word < 32 * steps - start)[None, :]
                is_factor = is_factor & (group < 4 * steps - start // _WORDS)[None, :]
            values_step = step // parts * (256 * blocks) + step % parts * BLOCK_WORDS
            packed = tl.load(values_at + values_step, mask=is_value, other=0)
            factors = tl.load(scales_at + step // parts * (32 * blocks), mask=is_factor, other=0.0)
            if parts == 2:  # fewer factors than a whole block's would not be copied beside other instructions
                is_mine = tl.arange(0, 2) == step % 2
                halves = tl.reshape(factors, (BLOCK_N, 2, 2)).to(tl.float32)
                factors = tl.sum(tl.where(is_mine[None, :, None], halves, 0.0), axis=1).to(tl.bfloat16)
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
    x_stride,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    EACH_PAIR: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
):
    """Grouped GEMM with weights on the left: one program per (block of BLOCK_N rows of the weight, tile of tokens).

    GATED: `gated` of x @ gate.T and x @ up.T for rows x[token]; rows of gate and up alternate in a block. Else routing
    weight * rows. EACH_PAIR: a tile is one (token, expert) pair; else as in `grouped_gemm`, where an expert's last tile
    takes a quarter of the time if it has SHORT tokens at most.
    """
    if EACH_PAIR:
        expert = tl.load(experts + tl.program_id(1))
        if expert < 0:  # another rank's: `out` is zero
            return
        _tile_product(
            x, values, scales, bias, pairs, weights, out, expert, 0, 1, tokens, N, row_words, x_stride,
            TOP_K, EACH_PAIR, GATED, BLOCK_M, BLOCK_N, BLOCK_WORDS, LIMIT, GELU,
        )  # fmt: skip
    else:
        expert, first, rows = tile_of(counts, tl.program_id(1), NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
        if rows == 0:
            return
        if SHORT > 0 and rows - first <= SHORT:
            _tile_product(
                x, values, scales, bias, pairs, weights, out, expert, first, rows, tokens, N, row_words, x_stride,
                TOP_K, EACH_PAIR, GATED, SHORT, BLOCK_N, BLOCK_WORDS, LIMIT, GELU,
            )  # fmt: skip
        else:
            _tile_product(
                x, values, scales, bias, pairs, weights, out, expert, first, rows, tokens, N, row_words, x_stride,
                TOP_K, EACH_PAIR, GATED, BLOCK_M, BLOCK_N, BLOCK_WORDS, LIMIT, GELU,
            )  # fmt: skip


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
        weight.k // 4,
        x.stride(0),
        TOP_K=top_k,
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=next_power_of_2(max(1, num_experts)),
        EACH_PAIR=num_experts == 0,
        GATED=is_gated,
        BLOCK_M=height,
        SHORT=tile.short,
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
    pdl: bool = True,
) -> Tensor:
    """Computes the result of `expert_gemv` for x [tokens, hidden] in bf16 and stacks in the order of `mx_ordered`.

    `routing` lists each expert's tokens, or has no lists: then weights are read once for each (token, expert) pair.
    `pdl` allows programmatic dependent launch.
    """
    tokens, hidden = x.shape
    top_k, width = routing.experts.shape[1], down.shape[-1]
    mean_rows = tokens * top_k / max(1, gate_up.values.shape[0]) if routing.counts.shape[0] else 1.0
    product = _product(mean_rows, x.device, pdl=pdl)
    between = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    make_out = torch.zeros if routing.is_local else torch.empty  # no tile writes what experts elsewhere make
    out = make_out((top_k, tokens, hidden), dtype=x.dtype, device=x.device)
    activation: dict[str, Any] = {"limit": swiglu_limit or 0.0, "gelu": gelu}
    product(x, routing, gate_up, between, is_gated=True, bias=gate_up_bias, **activation)
    product(between, routing, down, out, is_gated=False, bias=down_bias)
    return out


def _product(mean_rows: float, device: torch.device, *, pdl: bool) -> Callable[..., None]:
    """Returns what computes the products of experts with this mean number of tokens."""
    if mean_rows <= FEW_ROWS and device_profile(device).supports_gluon:
        from mini_infer_engine.kernels.moe.mx_few_rows import few_rows_product  # not every Triton has its Gluon

        return partial(few_rows_product, pdl=pdl)
    height, tile = mx_tile(mean_rows)
    return partial(mx_product, height=height, tile=tile)


FEW_ROWS = 5
"""The largest mean number of tokens per expert for `mx_few_rows`, whose programs have eight: more would read twice."""
_TILES = {
    16: MXTile(64, 32, 4, 4),
    32: MXTile(128, 32, 4, 3),
    64: MXTile(64, 32, 4, 3),
    128: MXTile(128, 32, 8, 3),
    256: MXTile(128, 16, 8, 3, 64),
}
"""Tiles of both products by tokens in a tile: near the best for gpt-oss-20b's experts on an H200 at every batch."""
_MEAN_ROWS = {16: 10, 32: 20, 64: 96, 128: 256}
"""The largest mean number of tokens per expert for each height but the last."""


def mx_tile(mean_rows: float) -> tuple[int, MXTile]:
    """Returns the tokens of a tile, and the tile of both products, for experts with this mean number of tokens."""
    height = next((height for height, most in _MEAN_ROWS.items() if mean_rows <= most), max(_TILES))
    return height, _TILES[height]
