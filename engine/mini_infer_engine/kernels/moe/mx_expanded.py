"""MXFP4 experts of many tokens: their weights are widened to bf16 in scratch memory, and grouped GEMM reads those.

Each expert's weights are widened once for all of its tokens, which `mx_experts` does once for each tile of tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.mx_order import FACTOR_OF_SCALE, GROUP_COLUMNS, GROUP_WORDS, VALUE_UNIT
from mini_infer_engine.kernels.moe.expert_tiles import expert_tiles
from mini_infer_engine.kernels.moe.grouped_gemm import grouped_product
from mini_infer_engine.kernels.moe.mx_widen import widened_words
from mini_infer_engine.kernels.moe.route import Routing
from mini_infer_engine.kernels.sizes import cdiv

_GROUP: tl.constexpr = tl.constexpr(GROUP_COLUMNS)
_WORDS: tl.constexpr = tl.constexpr(GROUP_WORDS)
_UNIT: tl.constexpr = tl.constexpr(VALUE_UNIT / FACTOR_OF_SCALE)
_BLOCK_ROWS, _BLOCK_WORDS = 4, 256
_SHARED_BYTES = 227 << 10
"""Shared memory of a program on Hopper, which alone has weights in this order."""
SCRATCH_BYTES = 1100 << 20
"""The largest size of widened weights: the first product of 32 of gpt-oss's experts. More experts take turns."""


@triton.jit
def _expand(values, scales, out, row_words, groups, rows, BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Widens a block of rows: out [rows, 4 * row_words] in the checkpoint's order of columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    word = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = (row < rows)[:, None]
    packed = tl.load(values + row[:, None] * row_words + word[None, :], mask=inside & (word < row_words), other=0)
    group = tl.program_id(1) * (BLOCK_WORDS // _WORDS) + tl.arange(0, BLOCK_WORDS // _WORDS)
    factors = tl.load(scales + row[:, None] * groups + group[None, :], mask=inside & (group < groups), other=0.0)
    w0, w1, w2, w3 = widened_words(packed, factors, BLOCK_ROWS, BLOCK_WORDS)
    four = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # the last two axes: the low and the high bit of the word's place
    four = tl.reshape(four, (BLOCK_ROWS, BLOCK_WORDS // _WORDS, _WORDS, 2, 2))
    in_order = tl.reshape(tl.permute(four, (0, 1, 4, 3, 2)), (BLOCK_ROWS, 4 * BLOCK_WORDS))
    column = tl.program_id(1) * (4 * BLOCK_WORDS) + tl.arange(0, 4 * BLOCK_WORDS)
    result = (in_order.to(tl.float32) * _UNIT).to(tl.bfloat16)
    tl.store(out + row[:, None] * (4 * row_words) + column[None, :], result, mask=inside & (column < 4 * row_words))


def expanded(weight: GroupedWeight, first: int, count: int, scratch: Tensor) -> Tensor:
    """Returns experts first .. first + count - 1 of a stack in bf16, [count, rows, columns], in `scratch`."""
    values = weight.values[first : first + count].view(torch.int16)
    scales = weight.scales[first : first + count]
    rows, row_words = values.shape[0] * values.shape[1], values.shape[2]
    out = scratch[: rows * row_words * 4].view(count, values.shape[1], row_words * 4)
    _expand[(cdiv(rows, _BLOCK_ROWS), cdiv(row_words, _BLOCK_WORDS))](
        values, scales, out, row_words, scales.shape[-1], rows, BLOCK_ROWS=_BLOCK_ROWS, BLOCK_WORDS=_BLOCK_WORDS
    )
    return out


def expanded_experts(
    x: Tensor,
    routing: Routing,
    gate_up: GroupedWeight,
    down: GroupedWeight,
    between: Tensor,
    out: Tensor,
    *,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    **activation: Any,
) -> Tensor:
    """Computes `mx_experts.mx_experts` into `between` [pairs, width] and `out` [choices, tokens, hidden], some experts
    at a time.
    """
    num_experts = len(gate_up.values)
    most_bytes = max(8 * stack.values.view(torch.int16)[0].numel() for stack in (gate_up, down))
    count = max(1, min(num_experts, SCRATCH_BYTES // most_bytes))
    scratch = torch.empty(count * most_bytes // 2, dtype=x.dtype, device=x.device)
    tiles = expert_tiles(len(between) / num_experts, 2, _SHARED_BYTES, is_plain=True)
    for first in range(0, num_experts, count):
        chosen = slice(first, min(first + count, num_experts))
        size = chosen.stop - first
        own = Routing(routing.weights, routing.experts, routing.counts[chosen], routing.pairs[chosen], routing.is_local)
        weight, bias = expanded(gate_up, first, size, scratch), _part(gate_up_bias, chosen)
        grouped_product(x, own, weight, between, tiles.height, tiles.gated, is_gated=True, bias=bias, **activation)
        weight, bias = expanded(down, first, size, scratch), _part(down_bias, chosen)
        grouped_product(between, own, weight, out, tiles.height, tiles.down, is_gated=False, bias=bias)
    return out


def _part(bias: Tensor | None, chosen: slice) -> Tensor | None:
    return None if bias is None else bias[chosen]
