"""Log-softmax of chosen and of the most likely tokens in two stages (as in online softmax: Milakov and Gimelshein,
arXiv:1805.02867).

The first computes softmax statistics and a top-k for each part of a row, the second merges them. Logits are read once
and nothing of their size is written. A key is a logit's bits in sorting order with the token's complement after them:
keys are distinct, so that a top-k is k maxima, and of equal logits the lower token is first.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import LOG2_E, cdiv, next_power_of_2

MAX_TOP_LOGPROBS = 32
"""The largest number of most likely tokens that the kernels report for a row."""
TOP_WIDTHS = (8, MAX_TOP_LOGPROBS)
"""Places for the top-k of a part: the merge is compiled for each."""
_PART_TOKENS = 1024
"""Tokens of a row that one warp reads: their maxima are exchanged by shuffles alone."""

_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
_FLOOR: tl.constexpr = tl.constexpr(-1e30)
"""The value that replaces -inf where a maximum is subtracted."""


@triton.jit
def _ordered(values):
    """Returns int64 that sort like these fp32 values; 32 bits are used."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _unordered(ordered):
    """Returns the fp32 value of such an integer."""
    bits = ordered.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["top", "width"])
def _top_of_parts(
    logits,
    logit_rows,
    slots,
    slot_rows,
    slot_tokens,
    maxima,
    sums,
    above,
    candidates,
    vocabulary,
    logits_stride,
    top,
    width,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
):
    """Computes maximum, sum of exponentials, number of logits above the chosen token's, and top-k of a part of a row.

    There is one program per (row, part of the vocabulary).
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    at = row.to(tl.int64) * tl.num_programs(1) + part
    source = logits + tl.load(logit_rows + row).to(tl.int64) * logits_stride
    slot = tl.load(slots + tl.load(slot_rows + row)).to(tl.int64)
    chosen = tl.load(source + tl.load(slot_tokens + slot)).to(tl.float32)
    places = tl.arange(0, PART)
    tokens = part * PART + places
    is_token = tokens < vocabulary
    stored = tl.load(source + tokens, mask=is_token, other=float("-inf"))
    values = stored.to(tl.float32)
    m_i = tl.maximum(tl.max(values, axis=0), _FLOOR)
    tl.store(maxima + at, m_i)
    tl.store(sums + at, tl.sum(tl.exp2((values - m_i) * _LOG2_E), axis=0))
    tl.store(above + at, tl.sum((values > chosen).to(tl.int32), axis=0))

    if NARROW:  # 16 bits of the logit and 16 of the place are one register
        bits = stored.to(tl.int16, bitcast=True).to(tl.int32)
        keys = (tl.where(bits < 0, bits ^ 0x7FFF, bits) << 16) | (0xFFFF - places)
        none = tl.full((), -0x80000000, tl.int32)
    else:
        keys = (_ordered(values) << 16) | (0xFFFF - places)
        none = tl.full((), -0x4000000000000000, tl.int64)
    keys = tl.where(is_token, keys, none)
    for place in range(top):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, none, keys)
        token = (part * PART + 0xFFFF - (best & 0xFFFF)).to(tl.int64)
        value = tl.load(source + token, mask=best != none, other=float("-inf")).to(tl.float32)
        key = tl.where(best != none, (_ordered(value) << 32) | (0x7FFFFFFF - token), -0x7FFFFFFFFFFFFFFF)
        tl.store(candidates + at * width + place, key)


@triton.jit(do_not_specialize=["top"])
def _merge(
    logits,
    logit_rows,
    slots,
    slot_rows,
    slot_tokens,
    named,
    maxima,
    sums,
    above,
    candidates,
    packed,
    logits_stride,
    top,
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    NAMED: tl.constexpr,
):
    """Merges the parts with one program per row: the normaliser, then the chosen token's line and the row's top-k."""
    row = tl.program_id(0)
    source = logits + tl.load(logit_rows + row).to(tl.int64) * logits_stride
    slot = tl.load(slots + tl.load(slot_rows + row)).to(tl.int64)
    token = tl.load(slot_tokens + slot)
    places = tl.arange(0, MAX_PARTS)
    first = row.to(tl.int64) * PARTS
    is_part = places < PARTS
    m_i = tl.load(maxima + first + places, mask=is_part, other=_FLOOR)
    l_i = tl.load(sums + first + places, mask=is_part, other=0.0)
    row_max = tl.max(m_i, axis=0)
    normaliser = row_max + tl.log(tl.sum(l_i * tl.exp2((m_i - row_max) * _LOG2_E), axis=0))
    rank = tl.sum(tl.load(above + first + places, mask=is_part, other=0), axis=0) + 1

    line = packed + row * (3 + 2 * top)
    logprob = tl.load(source + token).to(tl.float32) - normaliser
    tl.store(line, token.to(tl.int32))
    tl.store(line + 1, rank)
    tl.store(line + 2, logprob.to(tl.int32, bitcast=True))

    entries = tl.arange(0, MAX_PARTS * WIDTH)
    none = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
    is_candidate = (entries < PARTS * WIDTH) & (entries % WIDTH < top)
    keys = tl.load(candidates + first * WIDTH + entries, mask=is_candidate, other=-0x7FFFFFFFFFFFFFFF)
    for place in range(top):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, none, keys)
        chosen = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
        value = _unordered(best >> 32)
        if NAMED:
            name = tl.load(named + row * top + place)
            if name >= 0:
                chosen = name
                value = tl.load(source + name).to(tl.float32)
        tl.store(line + 3 + place, chosen)
        tl.store(line + 3 + top + place, (value - normaliser).to(tl.int32, bitcast=True))


def top_logprobs(
    logits: torch.Tensor,
    logit_rows: torch.Tensor,
    slots: torch.Tensor,
    slot_rows: torch.Tensor,
    slot_tokens: torch.Tensor,
    top: int,
    named: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns log probabilities of rows' chosen tokens and of the `top` most likely ones (at most MAX_TOP_LOGPROBS).

    logits [rows, vocabulary] of any float type; reported row i has logits[logit_rows[i]], and its chosen token is
    slot_tokens[slots[slot_rows[i]]]. `named` [reported, top] int32: tokens to report instead of the most likely ones,
    -1 for none. Returns [reported, 3 + 2 top] int32: token, rank (1: the most likely), bits of its fp32 log
    probability, the top tokens, bits of their log probabilities.
    """
    rows, vocabulary = logit_rows.shape[0], logits.shape[1]
    width = next(width for width in TOP_WIDTHS if width >= top)
    parts, device = cdiv(vocabulary, _PART_TOKENS), logits.device
    maxima = torch.empty((rows, parts), dtype=torch.float32, device=device)
    sums = torch.empty((rows, parts), dtype=torch.float32, device=device)
    above = torch.empty((rows, parts), dtype=torch.int32, device=device)
    candidates = torch.empty((rows, parts, width), dtype=torch.int64, device=device)
    packed = torch.empty((rows, 3 + 2 * top), dtype=torch.int32, device=device)
    chosen = (logits, logit_rows, slots, slot_rows, slot_tokens)
    statistics = (maxima, sums, above, candidates)
    _top_of_parts[(rows, parts)](
        *chosen,
        *statistics,
        vocabulary,
        logits.stride(0),
        top,
        width,
        NARROW=logits.element_size() == 2,
        PART=_PART_TOKENS,
        num_warps=1,
    )
    _merge[(rows,)](
        *chosen,
        packed if named is None else named,
        *statistics,
        packed,
        logits.stride(0),
        top,
        PARTS=parts,
        MAX_PARTS=next_power_of_2(parts),
        WIDTH=width,
        NAMED=named is not None,
        num_warps=4 if width == TOP_WIDTHS[0] else 8,
    )
    return packed
