"""FlashDecoding's inner loop over pages of one byte an element, for `decode_attention`.

Up to eight query heads of a KV head are the columns of products whose rows are tokens, or elements of values: the
tensor cores' instruction has 16 rows and eight columns, so that as rows most heads would be padding, and with them most
of the softmax. More than eight heads are rows. Elements of a byte pair belong to two products
(`quantized_rows.widened_pairs`).
"""

import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.page_ids import page_ids
from mini_infer_engine.kernels.attention.quantized_rows import unit_rows, unpacked_scales, widened, widened_pairs
from mini_infer_engine.kernels.attention.softcap import softcapped

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_UNIT_BITS: tl.constexpr = tl.constexpr(8.0)
UNIT: tl.constexpr = tl.constexpr(256.0)
"""The factor of probabilities, their sums and accumulators, 2^8.

Multiplied by the scales of values they would otherwise be too small for fp16. It is part of the exponent, which costs
nothing.
"""


@triton.jit
def _side_by_side(x, y, X_FIRST: tl.constexpr):
    """Returns all sums of an element of x and one of y, [x, y] or [y, x]."""
    return x[:, None] + y[None, :] if X_FIRST else y[:, None] + x[None, :]


@triton.jit
def scan_quantized(
    queries,
    new_score,
    new_value,
    is_last_split,
    table,
    head_pool,
    scale_pool,
    begin,
    end,
    kv_length,
    window,
    page_stride,
    kv_stride,
    token_stride,
    scale,
    softcap,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends over a split: returns acc [GROUP_BLOCK, DIM_BLOCK] not yet divided, l_i [GROUP_BLOCK], m_i in base two.

    queries [GROUP_BLOCK, DIM_BLOCK]. The last split begins with the new token: new_score [GROUP_BLOCK] in base two, and
    new_value [1, DIM_BLOCK] fp32 as later tokens will read it; it is zero in others.
    """
    kv_dtype: tl.constexpr = head_pool.dtype.element_ty
    dot_dtype: tl.constexpr = tl.float32 if queries.dtype == tl.float32 else tl.float16
    aligned: tl.constexpr = PAGE_SIZE % BLOCK == 0
    columns: tl.constexpr = GROUP_BLOCK == 8
    half_block: tl.constexpr = DIM_BLOCK // 2
    queries, query_scales = unit_rows(queries, dot_dtype)
    if columns:
        queries = tl.trans(queries)
    # Maxima are of scores that are still to be multiplied by this, in the exponent.
    factor = query_scales * (scale * _LOG2_E)
    m_i = new_score / factor
    if SOFTCAP:
        factor = tl.full((GROUP_BLOCK,), 1.0, dtype=tl.float32)
        m_i = new_score
    m_i = tl.where(is_last_split, m_i, float("-inf"))
    offsets = tl.arange(0, BLOCK)
    # A sum for each place in a block: what threads sum up among each other they do once, at the end.
    has_new_token = (offsets == 0) & is_last_split
    sums = tl.zeros((BLOCK, GROUP_BLOCK), dtype=tl.float32) + tl.where(has_new_token, UNIT, 0.0)[:, None]
    new_first, new_second = tl.split(tl.reshape(new_value * UNIT, (half_block, 2)))
    if columns:
        first_acc = tl.zeros((half_block, GROUP_BLOCK), dtype=tl.float32) + new_first[:, None]
        second_acc = tl.zeros((half_block, GROUP_BLOCK), dtype=tl.float32) + new_second[:, None]
    else:
        first_acc = tl.zeros((GROUP_BLOCK, half_block), dtype=tl.float32) + new_first[None, :]
        second_acc = tl.zeros((GROUP_BLOCK, half_block), dtype=tl.float32) + new_second[None, :]

    dims = tl.arange(0, DIM_BLOCK)[None, :]
    pairs = tl.arange(0, half_block)
    key_offsets = offsets[:, None] * token_stride + dims
    pair_offsets = _side_by_side(pairs, offsets * (token_stride // 2), columns)
    even_offsets = tl.arange(0, BLOCK // 2) * 2
    scale_pairs = scale_pool.to(tl.pointer_type(tl.int32))
    pages = page_ids(table, begin, kv_length, PAGE_SIZE, BLOCK)
    for start in range(begin, end, BLOCK):
        tokens = start + offsets
        even_tokens = start + even_offsets
        if aligned:
            in_page = start & (PAGE_SIZE - 1) if PAGE_SIZE & (PAGE_SIZE - 1) == 0 else start % PAGE_SIZE
            block_at = head_pool + (pages * page_stride + in_page * token_stride)
            key_at = block_at + key_offsets
            value_at = (block_at + kv_stride).to(tl.pointer_type(tl.int16)) + pair_offsets
            scale_at = scale_pairs + (pages * (page_stride // 4) + (in_page >> 1)) + even_offsets // 2
        else:
            at = pages * page_stride + (tokens % PAGE_SIZE) * token_stride
            key_at = head_pool + at[:, None] + dims
            value_at = (head_pool + kv_stride).to(tl.pointer_type(tl.int16)) + _side_by_side(pairs, at // 2, columns)
            pair_pages = tl.load(table + tl.minimum(even_tokens, kv_length) // PAGE_SIZE).to(tl.int64)
            scale_at = scale_pairs + pair_pages * (page_stride // 4) + even_tokens % PAGE_SIZE // 2
        key_scales = tl.load(scale_at, mask=even_tokens < end, other=0)
        value_scales = tl.load(scale_at + kv_stride // 4, mask=even_tokens < end, other=0)
        # Of the next block: keys do not wait for it.
        pages = page_ids(table, start + BLOCK, kv_length, PAGE_SIZE, BLOCK)
        mask = tokens < end
        if WINDOWED:
            mask = mask & (tokens > kv_length - window)
        # Without a mask of tokens: a block is in the sequence's pages, and scores behind its end are masked.
        if HEAD_DIM == DIM_BLOCK:
            keys = tl.load(key_at)
        else:
            keys = tl.load(key_at, mask=(dims < HEAD_DIM) & (offsets >= 0)[:, None], other=0.0)
        keys = widened(keys, dot_dtype)
        if columns:
            scores = tl.dot(keys, queries, input_precision=PRECISION)
        else:
            scores = tl.trans(tl.dot(queries, tl.trans(keys), input_precision=PRECISION))
        scores *= unpacked_scales(key_scales, BLOCK)[:, None]
        if SOFTCAP:
            scores = softcapped(scores * (query_scales * scale)[None, :], softcap) * _LOG2_E
        scores = tl.where(mask[:, None], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=0))
        p = tl.exp2(scores * factor[None, :] - (m_new * factor - _UNIT_BITS)[None, :])
        alpha = tl.exp2((m_i - m_new) * factor)
        sums = sums * alpha[None, :] + p
        inside = pairs < HEAD_DIM // 2
        if columns:
            value_pairs = tl.load(value_at, mask=inside[:, None] & mask[None, :], other=0)
        else:
            value_pairs = tl.load(value_at, mask=inside[None, :] & mask[:, None], other=0)
        first, second = widened_pairs(value_pairs, kv_dtype, dot_dtype)
        value_scales = tl.where(mask, unpacked_scales(value_scales, BLOCK), 0.0)
        p = (p * value_scales[:, None]).to(dot_dtype)
        if columns:
            first_acc = tl.dot(first, p, first_acc * alpha[None, :], input_precision=PRECISION)
            second_acc = tl.dot(second, p, second_acc * alpha[None, :], input_precision=PRECISION)
        else:
            p = tl.trans(p)
            first_acc = tl.dot(p, first, first_acc * alpha[:, None], input_precision=PRECISION)
            second_acc = tl.dot(p, second, second_acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    acc = tl.join(first_acc, second_acc)
    if columns:
        acc = tl.permute(acc, (1, 0, 2))
    return tl.reshape(acc, (GROUP_BLOCK, DIM_BLOCK)), tl.sum(sums, axis=0), m_i * factor
