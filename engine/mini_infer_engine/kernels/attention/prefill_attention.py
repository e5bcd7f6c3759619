"""FlashAttention-2 (Dao, arXiv:2307.08691) in Triton: causal attention of prompt chunks over their paged KV cache.

A tile consists of (query, head) pairs that share a KV head, so that the heads of a group load keys and values once. If
tiles are few and the context is long (a new tail after a cached prefix), several programs split a tile's keys
(split-KV), and a second kernel merges them: if the last program merged a whole tile, that would take as long as
splitting saves.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.attention_config import HopperPrefillConfig, PrefillConfig, PrefillShape
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.attention.quantized_rows import VALUE_UNIT, first_scale, unit_rows, widened
from mini_infer_engine.kernels.attention.sinks import add_sinks
from mini_infer_engine.kernels.attention.softcap import softcapped
from mini_infer_engine.kernels.attention.widen_pages import WIDENING_PROGRAMS_PER_SM, widen_pages
from mini_infer_engine.kernels.sizes import LOG2_E, cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace

_MAX_SPLITS = 16
_MIN_SPLIT_KEYS = 256
"""The least number of keys in a split: reading fewer takes less time than merging them."""
_MERGE_ROWS = 4
"""(Token, head) pairs of a program of `_merge`: one for each warp."""
_MERGE_SPLITS = 4
"""Splits that are loaded at a time."""


@triton.jit
def _scan(
    query,
    acc,
    l_i,
    m_i,
    query_scales,
    head_pool,
    scale_pool,
    table,
    first_key,
    last_key,
    positions,
    last_keys,
    end,
    page_stride,
    kv_stride,
    token_stride,
    scale,
    softcap,
    natural_scale,
    window,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """FlashAttention's inner loop: online softmax over keys [first_key, last_key). MASKED: not all rows see all.

    Rows are at `positions`, and see keys up to `last_keys` and, before their position, those within `window`.
    query_scales and scale_pool are those of quantised pages, and otherwise not read. Maxima m_i are of scores before
    they are multiplied by scale, and by the scale of their row's query if scores are not capped.
    """
    quantized: tl.constexpr = head_pool.dtype.element_ty.primitive_bitwidth == 8
    row_scale = scale
    column_scale = scale
    if quantized and not SOFTCAP:
        row_scale = scale * query_scales
        column_scale = row_scale[:, None]
    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims < HEAD_DIM
    for start in range(first_key, last_key, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        if PAGE_SIZE % BLOCK == 0:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            at = page * page_stride + (tokens % PAGE_SIZE) * token_stride
        else:
            page = tl.load(table + tokens // PAGE_SIZE, mask=tokens < end, other=0).to(tl.int64)
            at = page * page_stride + (tokens % PAGE_SIZE) * token_stride
        address = at[:, None] + dims[None, :]
        if MASKED:
            kv_mask = (tokens < end)[:, None] & dim_inside[None, :]
            keys = tl.load(head_pool + address, mask=kv_mask, other=0.0)
        elif HEAD_DIM == DIM_BLOCK:
            keys = tl.load(head_pool + address)
        else:
            keys = tl.load(head_pool + address, mask=dim_inside[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(widened(keys, query.dtype)), input_precision=PRECISION)
        if quantized:
            scale_at = scale_pool + page * (page_stride // 2) + tokens % PAGE_SIZE
            if MASKED:
                key_scales = tl.load(scale_at, mask=tokens < end, other=0.0).to(tl.float32)
                value_scales = tl.load(scale_at + kv_stride // 2, mask=tokens < end, other=0.0).to(tl.float32)
            else:
                key_scales = tl.load(scale_at).to(tl.float32)
                value_scales = tl.load(scale_at + kv_stride // 2).to(tl.float32)
            scores *= key_scales[None, :]
        if SOFTCAP and quantized:
            scores = softcapped(scores * (natural_scale * query_scales)[:, None], softcap)
        elif SOFTCAP:
            scores = softcapped(scores * natural_scale, softcap)
        if MASKED:
            mask = (tokens[None, :] <= last_keys[:, None]) & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(mask, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        shift = m_new * row_scale
        if MASKED:
            shift = tl.where(m_new == float("-inf"), 0.0, shift)  # a row without keys so far
        p = tl.exp2(scores * column_scale - shift[:, None])
        alpha = tl.exp2(m_i * row_scale - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        if MASKED:
            values = tl.load(head_pool + kv_stride + address, mask=kv_mask, other=0.0)
        elif HEAD_DIM == DIM_BLOCK:
            values = tl.load(head_pool + kv_stride + address)
        else:
            values = tl.load(head_pool + kv_stride + address, mask=dim_inside[None, :], other=0.0)
        values = widened(values, query.dtype)
        if quantized:
            p *= (value_scales * VALUE_UNIT)[None, :]
        acc = tl.dot(p.to(query.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def _find_tile(query_starts, sequences, tile_of_all, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Returns a tile's sequence and its number in it, or -1 after the last. A sequence's longest tile, the last, is
    first.
    """
    lanes = tl.arange(0, 64)
    sequence = 0
    tile = -1
    before = 0
    for first in range(0, sequences, 64):
        mask = first + lanes < sequences
        begins = tl.load(query_starts + first + lanes, mask=mask, other=0)
        ends = tl.load(query_starts + first + lanes + 1, mask=mask, other=0)
        tiles = tl.cdiv((ends - begins) * GROUP, ROWS)
        tiles_up_to = before + tl.cumsum(tiles)
        after = before + tl.sum(tiles)
        if (before <= tile_of_all) & (tile_of_all < after):
            lane = tl.sum((tiles_up_to <= tile_of_all).to(tl.int32))
            sequence = first + lane
            tile = tl.sum(tl.where(lanes == lane, tiles_up_to, 0)) - 1 - tile_of_all
        before = after
    return sequence, tile


@triton.jit(
    do_not_specialize=["splits", "sequences", "tokens", "table_stride"],
    do_not_specialize_on_alignment=["page_tables", "query_starts", "ends"],
)
def _prefill_attention(
    q,
    pool,
    page_tables,
    query_starts,
    ends,
    sinks,
    last_keys,
    out,
    partials,
    q_stride,
    page_stride,
    kv_stride,
    token_stride,
    table_stride,
    out_stride,
    scale,
    softcap,
    natural_scale,
    window,
    splits,
    sequences,
    tokens,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MERGE: tl.constexpr,
    MIN_SPLIT_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """FlashAttention-2 with split-KV: one program per (tile and split, KV head).

    scale: of the softmax's input, in base two. With SOFTCAP that is after the cap, and `natural_scale` is before it.
    """
    tile_of_all = tl.program_id(0) // splits
    sequence, tile = _find_tile(query_starts, sequences, tile_of_all, GROUP, ROWS)
    if tile < 0:
        return
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    begin = tl.load(query_starts + sequence).to(tl.int32)
    count = tl.load(query_starts + sequence + 1).to(tl.int32) - begin
    end = tl.load(ends + sequence).to(tl.int32)
    rows = tile * ROWS + tl.arange(0, ROWS)
    queries = rows // GROUP
    positions = end - count + queries
    first_position = end - count + tile * ROWS // GROUP
    last_position = tl.minimum(end - count + (tile * ROWS + ROWS - 1) // GROUP, end - 1)
    last_seen = positions
    last_key = last_position
    if last_keys is not None:
        last_seen = tl.load(last_keys + begin + queries, mask=queries < count, other=0).to(tl.int32)
        last_key = tl.max(last_seen, axis=0)

    # Keys that some row sees, in whole blocks, and this split's range of them.
    first_key = tl.maximum(first_position - window + 1, 0) // BLOCK * BLOCK
    blocks = tl.cdiv(last_key + 1 - first_key, BLOCK)
    blocks_of_split = tl.maximum(tl.cdiv(blocks, splits), MIN_SPLIT_BLOCKS)
    first_key_of_split = tl.minimum(first_key + split * blocks_of_split * BLOCK, first_key + blocks * BLOCK)
    end_of_split = tl.minimum(first_key_of_split + blocks_of_split * BLOCK, first_key + blocks * BLOCK)
    if MERGE:
        heads: tl.constexpr = GROUP * KV_HEADS
        split_rows = (split.to(tl.int64) * tokens + begin + queries) * heads + kv_head * GROUP + rows % GROUP
        acc_splits, m_splits, l_splits = _partials(partials, splits.to(tl.int64) * tokens * heads, DIM_BLOCK)
        if first_key_of_split >= end_of_split:
            tl.store(m_splits + split_rows, tl.full((ROWS,), float("-inf"), dtype=tl.float32), mask=queries < count)
            return
    # Before `diagonal` every row sees every key, unless a sliding window masks some.
    diagonal = (first_position + 1) // BLOCK * BLOCK
    if last_position - window >= 0:
        diagonal = 0
    first_masked_key = tl.minimum(tl.maximum(diagonal, first_key_of_split), end_of_split)

    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims < HEAD_DIM
    q_mask = (queries < count)[:, None] & dim_inside[None, :]
    head_columns = ((kv_head * GROUP + rows % GROUP) * HEAD_DIM)[:, None] + dims[None, :]
    query_rows = (begin + queries).to(tl.int64)[:, None]
    query = tl.load(q + query_rows * q_stride + head_columns, mask=q_mask, other=0.0)
    table = page_tables + sequence.to(tl.int64) * table_stride
    head_pool = pool + kv_head * HEAD_DIM
    quantized: tl.constexpr = pool.dtype.element_ty.primitive_bitwidth == 8
    scale_pool, query_scales = pool, scale
    if quantized:
        scale_pool = first_scale(pool, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        dot_dtype: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
        query, query_scales = unit_rows(query, dot_dtype)
    m_i = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    acc, l_i, m_i = _scan(
        query, acc, l_i, m_i, query_scales, head_pool, scale_pool, table, first_key_of_split, first_masked_key,
        positions, last_seen, end, page_stride, kv_stride, token_stride, scale, softcap, natural_scale, window, SOFTCAP,
        False, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, PRECISION,
    )  # fmt: skip
    acc, l_i, m_i = _scan(
        query, acc, l_i, m_i, query_scales, head_pool, scale_pool, table, first_masked_key, end_of_split, positions,
        last_seen, end, page_stride, kv_stride, token_stride, scale, softcap, natural_scale, window, SOFTCAP, True,
        HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, PRECISION,
    )  # fmt: skip

    if quantized:
        acc *= 1 / VALUE_UNIT
    if quantized and not SOFTCAP:
        m_i *= query_scales
    if sinks is not None:
        has_sink = (queries < count) & (split == 0)
        logits = tl.load(sinks + kv_head * GROUP + rows % GROUP, mask=has_sink, other=float("-inf")).to(tl.float32)
        acc, l_i, m_i = add_sinks(acc, l_i, m_i, logits, scale, 1.0)

    has_all = blocks_of_split >= blocks
    if MERGE:
        tl.store(m_splits + split_rows, tl.where(has_all, float("-inf"), m_i), mask=queries < count)
        if not has_all:
            tl.store(acc_splits + split_rows[:, None] * DIM_BLOCK + dims[None, :], acc, mask=(queries < count)[:, None])
            tl.store(l_splits + split_rows, l_i, mask=queries < count)
    if has_all:
        result = (acc / l_i[:, None]).to(out.dtype.element_ty)
        tl.store(out + query_rows * out_stride + head_columns, result, mask=q_mask)


@triton.jit
def _partials(partials, rows, DIM_BLOCK: tl.constexpr):
    """Returns where acc [rows, DIM_BLOCK], m_i [rows] and l_i [rows] of the splits begin; rows are ordered by split.

    m_i = -inf: the split has no keys, or has all of them and needs no merge. Its acc and l_i are not written then.
    """
    return partials, partials + rows * DIM_BLOCK, partials + rows * (DIM_BLOCK + 1)


@triton.jit(do_not_specialize=["splits", "tokens"])
def _merge(
    partials,
    out,
    out_stride,
    scale,
    splits,
    tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Split-KV's second phase: a program merges `ROWS` (token, head) pairs, from all splits with keys of theirs."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_BLOCK)
    all_rows = tokens * HEADS
    acc_splits, m_splits, l_splits = _partials(partials, splits.to(tl.int64) * all_rows, DIM_BLOCK)
    index = tl.arange(0, MAX_SPLITS)[None, :]
    split_rows = index.to(tl.int64) * all_rows + rows[:, None]
    mask = (rows < all_rows)[:, None] & (index < splits)
    m_all = tl.load(m_splits + split_rows, mask=mask, other=float("-inf"))
    l_all = tl.load(l_splits + split_rows, mask=mask, other=0.0)
    m_i = tl.max(m_all, axis=1)
    m_shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    has_keys = m_all > float("-inf")
    weights = tl.exp2((m_all - m_shift[:, None]) * scale)
    l_i = tl.sum(tl.where(has_keys, l_all * weights, 0.0), axis=1)
    acc = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    for first in range(0, tl.max(tl.where(has_keys, index + 1, 0)), MERGE_SPLITS):
        for unroll in tl.static_range(MERGE_SPLITS):
            split = first + unroll
            split_row = split.to(tl.int64) * all_rows + rows
            m_split = tl.load(m_splits + split_row, mask=(rows < all_rows) & (split < splits), other=float("-inf"))
            acc_at = acc_splits + split_row[:, None] * DIM_BLOCK + dims[None, :]
            acc_split = tl.load(acc_at, mask=(m_split > float("-inf"))[:, None], other=0.0)
            acc += acc_split * tl.exp2((m_split - m_shift) * scale)[:, None]
    result = (acc / l_i[:, None]).to(out.dtype.element_ty)
    head_columns = ((rows % HEADS) * HEAD_DIM)[:, None] + dims[None, :]
    out_inside = (m_i > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + (rows // HEADS).to(tl.int64)[:, None] * out_stride + head_columns, result, mask=out_inside)


def prefill_shape(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: PrefillRows,
    sliding_window: int | None = None,
    softcap: float | None = None,
    wide_pages: int = 0,
) -> PrefillShape:
    """Returns the sizes of a call of `prefill_attention`, by which a policy chooses its config.

    wide_pages: pages in 16 bits for which the workspace has room.
    """
    tokens, q_heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = pool.shape
    sequences = rows.ends.shape[0]
    return PrefillShape(
        q.dtype,
        pool.dtype,
        tokens,
        sequences,
        q_heads,
        kv_heads,
        head_dim,
        page_size,
        sliding_window,
        rows.longest_key,
        softcap is not None,
        rows.pages,
        wide_pages,
    )


def prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: PrefillRows,
    *,
    scale: float,
    config: PrefillConfig | HopperPrefillConfig,
    workspace: Workspace,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends from each sequence's new tokens over all its tokens; their keys and values are in the pool already.

    q [tokens, q_heads, head_dim], its rows may be strided; pool: one layer's view [pages, 2, page_size, kv_heads,
    head_dim], of q's dtype or of one byte an element (as `rope_kv` documents). Returns [tokens, q_heads * head_dim], in
    `out` if given. The config, from `KernelPolicy.prefill_config`, selects one of two kernels. softcap: the cap of
    `softcap.softcapped`, or None for none. sinks: logits [q_heads] of `sinks.add_sinks`, or None.
    """
    tokens, q_heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = pool.shape
    group = q_heads // kv_heads
    sequences = rows.ends.shape[0]
    if out is None:
        out = torch.empty((tokens, q_heads * head_dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    if isinstance(config, HopperPrefillConfig):
        assert rows.last_keys is None, "the FlashAttention-3 kernel is causal: KernelPolicy.flash_attention_2_config"
        assert softcap is None, "the FlashAttention-3 kernel does not cap scores: KernelPolicy.prefill_config"
        from mini_infer_engine.kernels.attention.hopper_prefill_attention import hopper_prefill_attention

        if config.widens:
            programs = config.programs * WIDENING_PROGRAMS_PER_SM
            pool, rows = widen_pages(pool, rows, q.dtype, workspace=workspace, programs=programs)
        hopper_prefill_attention(q, pool, rows, scale=scale, config=config, sinks=sinks, out=out)
        return out
    dim_block = next_power_of_2(head_dim)
    full_tiles = cdiv(tokens * group, config.rows)
    tiles = full_tiles + sequences  # at most: each sequence may end with a tile that is not full
    splits = max(1, min(_MAX_SPLITS, config.programs // (full_tiles * kv_heads)))
    partial_floats = splits * tokens * q_heads * (dim_block + 2) if splits > 1 else 0
    partials = workspace.partials(partial_floats)
    base_two_scale = LOG2_E if softcap is not None else scale * LOG2_E
    _prefill_attention[(tiles * splits, kv_heads)](
        q,
        pool,
        rows.page_tables,
        rows.query_starts,
        rows.ends,
        sinks,
        rows.last_keys,
        out,
        partials,
        q.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        rows.page_tables.stride(0),
        out.stride(0),
        base_two_scale,
        softcap or 0.0,
        scale,
        sliding_window or (1 << 30),
        splits,
        sequences,
        tokens,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        PAGE_SIZE=page_size,
        ROWS=config.rows,
        BLOCK=config.keys,
        SOFTCAP=softcap is not None,
        MERGE=splits > 1,
        MIN_SPLIT_BLOCKS=cdiv(_MIN_SPLIT_KEYS, config.keys),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        _merge[(cdiv(tokens * q_heads, _MERGE_ROWS),)](
            partials,
            out,
            out.stride(0),
            base_two_scale,
            splits,
            tokens,
            HEADS=q_heads,
            HEAD_DIM=head_dim,
            DIM_BLOCK=dim_block,
            MAX_SPLITS=_MAX_SPLITS,
            MERGE_SPLITS=_MERGE_SPLITS,
            ROWS=_MERGE_ROWS,
            num_warps=4,
        )
    return out
