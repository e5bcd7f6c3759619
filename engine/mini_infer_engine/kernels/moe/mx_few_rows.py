"""Experts in MXFP4 of few tokens each, in Gluon for Hopper: a ring of shared memory keeps many weights on their way.

The tensor cores' instruction (mma m16n8k16) has 16 rows of the weight on its left and 8 tokens on its right: a few
tokens cost little. A thread has whole groups of 32 columns: the 16 bytes of a weight's row in the order of
`gemm.mx_order`, and the same columns of its token. Both are in their registers of the instruction as they are loaded,
if its columns are numbered accordingly. Of gate and up a thread has the same column, so that it computes the
activation, too. A program's warps share out K: programs are short, and the last of them leave few SMs idle.

It is launched with PDL (`gemm.pdl_gemm` has the rule for such kernels): the second product's programs copy their first
weights while the last of the first product's run. Routing was computed by the kernel before that.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.mx_order import FACTOR_OF_SCALE, GROUP_COLUMNS, VALUE_UNIT
from mini_infer_engine.kernels.moe.route import Routing
from mini_infer_engine.kernels.pdl import grid_dependency_wait, launch_dependents
from mini_infer_engine.kernels.sizes import cdiv

_UNIT = gl.constexpr(VALUE_UNIT / FACTOR_OF_SCALE)
_SWIGLU_ALPHA = gl.constexpr(1.702)
_WIDEN = gl.constexpr(
    """
    {
    .reg .b32 sign, number, factor, first, second, third, fourth;
    mov.b32 factor, {$9, $9};
    and.b32 first, $8, 0x81C081C0;
    shl.b32 number, $8, 3;
    and.b32 second, number, 0x81C081C0;
    shr.u32 number, $8, 3;
    and.b32 number, number, 0x01C001C0;
    shl.b32 sign, $8, 1;
    lop3.b32 third, sign, 0x80008000, number, 0xEA;
    shl.b32 number, $8, 6;
    and.b32 number, number, 0x01C001C0;
    shl.b32 sign, $8, 2;
    lop3.b32 fourth, sign, 0x80008000, number, 0xEA;
    mul.rn.bf16x2 first, first, factor;
    mul.rn.bf16x2 second, second, factor;
    mul.rn.bf16x2 third, third, factor;
    mul.rn.bf16x2 fourth, fourth, factor;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
    mov.b32 {$4, $5}, third;
    mov.b32 {$6, $7}, fourth;
    }
    """
)
"""Widens two words of `mx_order` as `mx_widen` does: their first values, their second ones, and so on."""


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """A program: rows of the weight (gate and up together), warps, of which each has a share of K, and stages."""

    rows: int
    num_warps: int
    num_stages: int


_EACH_PAIR = FewRowsTile(16, 4, 2)
_TILES = ((0.75, FewRowsTile(64, 2, 2)), (1.5, FewRowsTile(32, 1, 3)), (4.5, FewRowsTile(64, 1, 2)))
"""Tiles of both products by the largest mean number of tokens per expert: the best of gpt-oss-20b's on an H200."""
_MOST_TOKENS = FewRowsTile(64, 2, 2)


def few_rows_tile(mean_rows: float, *, is_each_pair: bool) -> FewRowsTile:
    """Returns the tile for experts with this mean number of tokens; `is_each_pair`: a program for each pair."""
    if is_each_pair:
        return _EACH_PAIR
    return next((tile for most, tile in _TILES if mean_rows <= most), _MOST_TOKENS)


@gluon.jit
def _gated(gate, up, dtype: gl.constexpr, LIMIT: gl.constexpr, GELU: gl.constexpr):
    """Computes what `gated.gated` does."""
    if LIMIT > 0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
        result = gate / (1.0 + gl.exp(-(gate * _SWIGLU_ALPHA))) * (up + 1.0)
    elif GELU:
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = (gate / (1.0 + gl.exp(-twice))).to(dtype).to(gl.float32) * up
    else:
        result = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up
    return result


@gluon.jit
def _weight_operand(packed, factors, mma: gl.constexpr):
    """Widens double words [W, ROWS, 4 groups, 4] with factors [W, ROWS, 4 groups] to left operands [W, ROWS, 128]."""
    shares: gl.constexpr = packed.shape[0]
    rows: gl.constexpr = packed.shape[1]
    w0, v0, w1, v1, w2, v2, w3, v3 = gl.inline_asm_elementwise(
        _WIDEN,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h",
        [packed, gl.expand_dims(factors, 3).broadcast_to([shares, rows, 4, 4])],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    eight = gl.join(gl.join(gl.join(w0, w1), gl.join(w2, w3)), gl.join(gl.join(v0, v1), gl.join(v2, v3)))
    ordered = gl.reshape(gl.permute(eight, (0, 1, 5, 4, 3, 2, 6)), [shares, rows, 128])
    return gl.convert_layout(ordered, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def _token_operand(columns, mma: gl.constexpr):
    """Returns tokens' pairs of columns [W, N, 4 groups, 16] as right operands [W, 128, N], as `_weight_operand`'s."""
    shares: gl.constexpr = columns.shape[0]
    tokens: gl.constexpr = columns.shape[1]
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [columns], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    pairs = gl.reshape(gl.join(low, high), [shares, tokens, 4, 4, 4, 2])
    ordered = gl.reshape(gl.permute(pairs, (0, 3, 4, 2, 5, 1)), [shares, 128, tokens])
    return gl.convert_layout(ordered, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def _blocks_of_rows(first, number, N, GATED: gl.constexpr):
    """Returns the block of 8 rows of the weight that each of a program's rows is in; beyond the last: the last."""
    if GATED:
        return gl.minimum(first // 8 + number // 16, N // 8 - 1) + number // 8 % 2 * (N // 8)
    return gl.minimum((first + number) // 8, N // 8 - 1)


@gluon.jit
def _copy(words, factors, words_at, factors_at, share, factors_share, step, steps):
    """Begins to copy one block of columns for each warp; zeros beyond the last one."""
    shares: gl.constexpr = words.shape[0]
    left = steps - step * shares
    async_copy.async_copy_global_to_shared(
        words, words_at + step * (128 * shares), mask=share < left, cache_modifier=".cg"
    )
    async_copy.async_copy_global_to_shared(factors, factors_at + step * (32 * shares), mask=factors_share < left)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["tokens"])
def _few_rows(
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
    groups,
    x_stride,
    TOP_K: gl.constexpr,
    EACH_PAIR: gl.constexpr,
    GATED: gl.constexpr,
    LIMIT: gl.constexpr,
    GELU: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    of_words: gl.constexpr,
    of_flat: gl.constexpr,
    of_copied_factors: gl.constexpr,
    of_x: gl.constexpr,
):
    """Grouped GEMM: one program per (ROWS rows of the weight, expert), which computes TOKENS tokens at a time.

    EACH_PAIR: one per (rows, pair of a token and an expert). GATED: rows of gate and up alternate by eights.
    """
    shares: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [shares, 1, 1], [1, 16, 8])
    of_token: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, of_x)))
    token = gl.arange(0, TOKENS, of_token)
    if GATED:
        grid_dependency_wait()
    launch_dependents()
    count = 1
    listed = token * 0
    pairs_at = pairs
    if EACH_PAIR:
        expert = gl.load(experts + gl.program_id(1))
        if expert < 0:  # another rank's: `out` is zero
            grid_dependency_wait()
            return
    else:
        expert = gl.program_id(1)
        pairs_at += expert.to(gl.int64) * tokens
        listed = gl.load(pairs_at + token, mask=token < tokens, other=0)
        count = gl.load(counts + expert)
        if count == 0:
            grid_dependency_wait()
            return

    first_column = gl.program_id(0) * (ROWS // 2 if GATED else ROWS)
    first_row = expert.to(gl.int64) * (2 * N if GATED else N)
    steps = (groups + 3) // 4
    of_share: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, of_flat))
    share = gl.arange(0, shares, of_share)[:, None, None]
    number = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, of_flat)))
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, of_flat)))[None, None, :]
    at = _blocks_of_rows(first_column, number, N, GATED) * (128 * steps) + number % 8 * 16
    words_at = values + first_row * (16 * steps) + (at[None, :, None] + share * 128 + word)
    number = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, of_copied_factors)))
    factors_share = gl.arange(0, shares, gl.SliceLayout(1, gl.SliceLayout(2, of_copied_factors)))[:, None, None]
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, of_copied_factors)))[None, None, :]
    at = _blocks_of_rows(first_column, number, N, GATED) * (32 * steps) + number % 8 * 4
    factors_at = scales + first_row * (4 * steps) + (at[None, :, None] + factors_share * 32 + group)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, shares, ROWS, 16], plain)
    factors_ring = gl.allocate_shared_memory(scales.dtype.element_ty, [STAGES, shares, ROWS, 4], plain)

    x_share = gl.arange(0, shares, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, of_x))))[:, None, None, None]
    x_group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, of_x))))[None, None, :, None]
    x_group += x_share * 4
    x_column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, of_x))))[None, None, None, :]
    turns = (steps + shares - 1) // shares
    for first in range(0, count, TOKENS):
        for stage in gl.static_range(STAGES - 1):
            _copy(
                ring.index(stage), factors_ring.index(stage), words_at, factors_at, share, factors_share, stage, steps
            )
        # For tokens that are not there, the first one is computed in vain.
        pair = gl.program_id(1) + listed if EACH_PAIR else gl.where(first + token < count, listed, 0)
        source = (pair // TOP_K if GATED else pair).to(gl.int64) * x_stride
        if not GATED:
            grid_dependency_wait()
        x_at = x + source[None, :, None, None] + x_column
        columns = gl.load(x_at + gl.minimum(x_group, groups - 1) * 16)
        acc = gl.zeros([shares, ROWS, TOKENS], gl.float32, mma)
        slot = 0
        last = STAGES - 1
        for step in range(turns):
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            packed = gl.reshape(ring.index(slot).load(of_flat), [shares, ROWS, 4, 4])
            packed = gl.convert_layout(packed, of_words, assert_trivial=True)
            factors = factors_ring.index(slot).load(gl.SliceLayout(3, of_words))
            ahead = step + STAGES - 1
            _copy(ring.index(last), factors_ring.index(last), words_at, factors_at, share, factors_share, ahead, steps)
            last = slot
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            next_columns = gl.load(x_at + gl.minimum(x_group + 4 * shares * (step + 1), groups - 1) * 16)
            acc = mma_v2(_weight_operand(packed, factors, mma), _token_operand(columns, mma), acc)
            columns = next_columns
        async_copy.wait_group(0)
        gl.thread_barrier()
        result = gl.sum(acc, axis=0) * _UNIT
        of_result: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, mma))
        if bias is not None:
            place_of_row = gl.arange(0, ROWS, of_result)
            row = _blocks_of_rows(first_column, place_of_row, N, GATED) * 8 + place_of_row % 8
            result += gl.load(bias + first_row + row).to(gl.float32)[:, None]
        result = result.to(out.dtype.element_ty).to(gl.float32)
        if GATED:
            halves = gl.permute(gl.reshape(result, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1))
            gate, up = gl.split(halves)
            gate = gl.reshape(gate, [ROWS // 2, TOKENS])
            up = gl.reshape(up, [ROWS // 2, TOKENS])
            result = _gated(gate, up, out.dtype.element_ty, LIMIT, GELU)
        stored = first + gl.arange(0, TOKENS, gl.SliceLayout(0, result.type.layout))
        column = first_column + gl.arange(0, result.shape[0], gl.SliceLayout(1, result.type.layout))
        is_token = stored < count
        place = gl.program_id(1) + stored if EACH_PAIR else gl.load(pairs_at + stored, mask=is_token, other=0)
        if not GATED:
            result *= gl.load(weights + place, mask=is_token, other=0.0)[None, :]
            place = place % TOP_K * tokens + place // TOP_K
        out_at = out + place.to(gl.int64)[None, :] * N + column[:, None]
        gl.store(out_at, result.to(out.dtype.element_ty), mask=is_token[None, :] & (column < N)[:, None])
        if not EACH_PAIR:
            listed = gl.load(pairs_at + first + TOKENS + token, mask=first + TOKENS + token < tokens, other=0)


@cache
def _layouts(rows: int, tokens: int, warps: int) -> dict[str, gl.DistributedLinearLayout | gl.BlockedLayout]:
    """Returns how threads have words of the weight and columns of tokens: a warp has a share of K, a thread a group."""
    warp = [1 << bit for bit in range(warps.bit_length() - 1)]
    tiles = [16 << bit for bit in range((rows // 16).bit_length() - 1)]
    more_tokens = [8 << bit for bit in range((tokens // 8).bit_length() - 1)]
    return {
        "of_words": gl.DistributedLinearLayout(
            [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0], *([0, tile, 0, 0] for tile in tiles)],
            [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
            [[share, 0, 0, 0] for share in warp],
            [],
            [warps, rows, 4, 4],
        ),
        "of_flat": gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 8, 0], *([0, tile, 0] for tile in tiles)],
            [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
            [[share, 0, 0] for share in warp],
            [],
            [warps, rows, 16],
        ),
        "of_copied_factors": gl.BlockedLayout([1, 1, 2], [1, 16, 2], [warps, 1, 1], [2, 1, 0]),
        "of_x": gl.DistributedLinearLayout(
            [[0, 0, 0, 1 << bit] for bit in range(4)] + [[0, token, 0, 0] for token in more_tokens],
            [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
            [[share, 0, 0, 0] for share in warp],
            [],
            [warps, tokens, 4, 16],
        ),
    }


def few_rows_product(
    x: Tensor,
    routing: Routing,
    weight: GroupedWeight,
    out: Tensor,
    height: int = 8,
    tile: FewRowsTile | None = None,
    *,
    is_gated: bool,
    bias: Tensor | None = None,
    limit: float = 0.0,
    gelu: bool = False,
    pdl: bool = True,
) -> None:
    """Computes one of the two products of experts into `out`, as `grouped_gemm.grouped_product` does.

    A program computes `height` tokens at a time. A routing without lists of tokens has programs for each pair. The tile
    is chosen by the mean number of tokens per expert if there is none.
    """
    (tokens, top_k), num_experts = routing.experts.shape, routing.counts.shape[0]
    if tile is None:
        tile = few_rows_tile(tokens * top_k / max(1, num_experts), is_each_pair=num_experts == 0)
    n = out.shape[-1]
    _few_rows[(cdiv(n * (1 + is_gated), tile.rows), num_experts or tokens * top_k)](
        x.view(torch.int32),
        weight.values.view(torch.int32),
        weight.scales,
        bias,
        routing.counts,
        routing.pairs,
        routing.experts,
        routing.weights,
        out,
        tokens,
        n,
        weight.k // GROUP_COLUMNS,
        x.stride(0) // 2,
        TOP_K=top_k,
        EACH_PAIR=num_experts == 0,
        GATED=is_gated,
        LIMIT=limit,
        GELU=gelu,
        ROWS=tile.rows,
        TOKENS=height,
        STAGES=tile.num_stages,
        **_layouts(tile.rows, height, tile.num_warps),
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
