"""Causal attention of prompt chunks over their paged KV cache: FlashAttention-2 (Dao, arXiv:2307.08691) in Triton.

A tile is rows of (query, head) pairs that share a KV head, so that grouped heads read keys and values once. Where tiles
are few and the context long (a new tail behind a cached prefix), several programs share a tile's keys, and a second
kernel adds up what they found: one program that did it for a whole tile would take as long as the sharing saves.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.attention_config import HopperPrefillConfig, PrefillConfig, PrefillShape
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.sizes import LOG2_E, cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace

_MOST_SPLITS = 16
_LEAST_KEYS = 256
"""Of a share: reading fewer takes less than adding up."""
_MERGED_ROWS = 4
"""Of a program: one for each warp."""
_MERGED_SPLITS = 4
"""That are read at a time."""


@triton.jit
def _scan(
    query,
    total,
    mass,
    top,
    head_pool,
    table,
    first,
    last,
    positions,
    end,
    page_stride,
    kv_stride,
    token_stride,
    scale,
    window,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The online softmax over keys [first, last); without masks where every row sees every key."""
    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims < HEAD_DIM
    for start in range(first, last, BLOCK):
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
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION)
        if MASKED:
            seen = (tokens[None, :] <= positions[:, None]) & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = new_top * scale
        if MASKED:
            shift = tl.where(new_top == float("-inf"), 0.0, shift)  # a row that has seen nothing yet
        weights = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(top * scale - shift)
        mass = mass * decay + tl.sum(weights, axis=1)
        if MASKED:
            values = tl.load(head_pool + kv_stride + address, mask=kv_mask, other=0.0)
        elif HEAD_DIM == DIM_BLOCK:
            values = tl.load(head_pool + kv_stride + address)
        else:
            values = tl.load(head_pool + kv_stride + address, mask=dim_inside[None, :], other=0.0)
        values = values.to(query.dtype)
        total = tl.dot(weights.to(query.dtype), values, total * decay[:, None], input_precision=PRECISION)
        top = new_top
    return total, mass, top


@triton.jit
def _find_tile(query_starts, sequences, tile_of_all, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Whose tile this is, and which of its own; -1 behind the last. A sequence begins with its last, the longest."""
    lanes = tl.arange(0, 64)
    sequence = 0
    tile = -1
    before = 0
    for first in range(0, sequences, 64):
        inside = first + lanes < sequences
        begins = tl.load(query_starts + first + lanes, mask=inside, other=0)
        ends = tl.load(query_starts + first + lanes + 1, mask=inside, other=0)
        tiles = tl.cdiv((ends - begins) * GROUP, ROWS)
        upto = before + tl.cumsum(tiles)
        after = before + tl.sum(tiles)
        if (before <= tile_of_all) & (tile_of_all < after):
            lane = tl.sum((upto <= tile_of_all).to(tl.int32))
            sequence = first + lane
            tile = tl.sum(tl.where(lanes == lane, upto, 0)) - 1 - tile_of_all
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
    out,
    partials,
    q_stride,
    page_stride,
    kv_stride,
    token_stride,
    table_stride,
    out_stride,
    scale,
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
    MERGE: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile and split, KV head)."""
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

    # Keys that some row sees, in whole blocks, and this split's share of them.
    first_key = tl.maximum(first_position - window + 1, 0) // BLOCK * BLOCK
    blocks = tl.cdiv(last_position + 1 - first_key, BLOCK)
    blocks_of_split = tl.maximum(tl.cdiv(blocks, splits), LEAST_BLOCKS)
    low = tl.minimum(first_key + split * blocks_of_split * BLOCK, first_key + blocks * BLOCK)
    high = tl.minimum(low + blocks_of_split * BLOCK, first_key + blocks * BLOCK)
    if MERGE:
        heads: tl.constexpr = GROUP * KV_HEADS
        places = (split.to(tl.int64) * tokens + begin + queries) * heads + kv_head * GROUP + rows % GROUP
        sums, tops, masses = _partials(partials, splits.to(tl.int64) * tokens * heads, DIM_BLOCK)
        if low >= high:
            tl.store(tops + places, tl.full((ROWS,), float("-inf"), dtype=tl.float32), mask=queries < count)
            return
    # Before `diagonal` every row sees every key, unless a window cuts.
    diagonal = (first_position + 1) // BLOCK * BLOCK
    if last_position - window >= 0:
        diagonal = 0
    middle = tl.minimum(tl.maximum(diagonal, low), high)

    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims < HEAD_DIM
    inside = (queries < count)[:, None] & dim_inside[None, :]
    columns = ((kv_head * GROUP + rows % GROUP) * HEAD_DIM)[:, None] + dims[None, :]
    query_rows = (begin + queries).to(tl.int64)[:, None]
    query = tl.load(q + query_rows * q_stride + columns, mask=inside, other=0.0)
    table = page_tables + sequence.to(tl.int64) * table_stride
    head_pool = pool + kv_head * HEAD_DIM
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    total, mass, top = _scan(
        query, total, mass, top, head_pool, table, low, middle, positions, end, page_stride, kv_stride, token_stride,
        scale, window, False, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, PRECISION,
    )  # fmt: skip
    total, mass, top = _scan(
        query, total, mass, top, head_pool, table, middle, high, positions, end, page_stride, kv_stride, token_stride,
        scale, window, True, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, PRECISION,
    )  # fmt: skip

    has_all = blocks_of_split >= blocks
    if MERGE:
        tl.store(tops + places, tl.where(has_all, float("-inf"), top), mask=queries < count)
        if not has_all:
            tl.store(sums + places[:, None] * DIM_BLOCK + dims[None, :], total, mask=(queries < count)[:, None])
            tl.store(masses + places, mass, mask=queries < count)
    if has_all:
        result = (total / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + query_rows * out_stride + columns, result, mask=inside)


@triton.jit
def _partials(partials, rows, DIM_BLOCK: tl.constexpr):
    """Where the weighted sums [rows, DIM_BLOCK] begin, the maxima [rows] and the masses [rows]; rows by split first.

    A maximum of -inf: the share has no keys, or has all of them and no need of others. What else it has is not written.
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
    MOST_SPLITS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program: `ROWS` (token, head) pairs, from all splits that have a part of their keys."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_BLOCK)
    all_rows = tokens * HEADS
    sums, tops, masses = _partials(partials, splits.to(tl.int64) * all_rows, DIM_BLOCK)
    every = tl.arange(0, MOST_SPLITS)[None, :]
    places = every.to(tl.int64) * all_rows + rows[:, None]
    inside = (rows < all_rows)[:, None] & (every < splits)
    its_tops = tl.load(tops + places, mask=inside, other=float("-inf"))
    its_masses = tl.load(masses + places, mask=inside, other=0.0)
    top = tl.max(its_tops, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    has_keys = its_tops > float("-inf")
    factors = tl.exp2((its_tops - shift[:, None]) * scale)
    mass = tl.sum(tl.where(has_keys, its_masses * factors, 0.0), axis=1)
    total = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    for first in range(0, tl.max(tl.where(has_keys, every + 1, 0)), MERGED_SPLITS):
        for index in tl.static_range(MERGED_SPLITS):
            split = first + index
            place = split.to(tl.int64) * all_rows + rows
            its_top = tl.load(tops + place, mask=(rows < all_rows) & (split < splits), other=float("-inf"))
            its_place = sums + place[:, None] * DIM_BLOCK + dims[None, :]
            its_sum = tl.load(its_place, mask=(its_top > float("-inf"))[:, None], other=0.0)
            total += its_sum * tl.exp2((its_top - shift) * scale)[:, None]
    result = (total / mass[:, None]).to(out.dtype.element_ty)
    columns = ((rows % HEADS) * HEAD_DIM)[:, None] + dims[None, :]
    out_inside = (top > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + (rows // HEADS).to(tl.int64)[:, None] * out_stride + columns, result, mask=out_inside)


def prefill_shape(
    q: torch.Tensor, pool: torch.Tensor, rows: PrefillRows, sliding_window: int | None = None
) -> PrefillShape:
    """Sizes of a call of `prefill_attention`, by which a policy chooses its config."""
    tokens, q_heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = pool.shape
    sequences = rows.ends.shape[0]
    return PrefillShape(
        q.dtype, pool.dtype, tokens, sequences, q_heads, kv_heads, head_dim, page_size, sliding_window, rows.longest_key
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each sequence's new tokens over all its tokens; their keys and values are in the pool already.

    q [tokens, q_heads, head_dim], its rows may be strided; pool: one layer's view
    [pages, 2, page_size, kv_heads, head_dim], of q's dtype or fp8. Returns [tokens, q_heads * head_dim], in `out` where
    that is given. The config says which of the two kernels computes it: `KernelPolicy.prefill_config`.
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
        from mini_infer_engine.kernels.attention.hopper_prefill_attention import hopper_prefill_attention

        hopper_prefill_attention(q, pool, rows, scale=scale, config=config, out=out)
        return out
    dim_block = next_power_of_2(head_dim)
    full_tiles = cdiv(tokens * group, config.rows)
    tiles = full_tiles + sequences  # at most: each sequence may end with a part of one
    splits = max(1, min(_MOST_SPLITS, config.programs // (full_tiles * kv_heads)))
    partial_floats = splits * tokens * q_heads * (dim_block + 2) if splits > 1 else 0
    partials = workspace.partials(partial_floats)
    base_two_scale = scale * LOG2_E
    _prefill_attention[(tiles * splits, kv_heads)](
        q,
        pool,
        rows.page_tables,
        rows.query_starts,
        rows.ends,
        out,
        partials,
        q.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        rows.page_tables.stride(0),
        out.stride(0),
        base_two_scale,
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
        MERGE=splits > 1,
        LEAST_BLOCKS=cdiv(_LEAST_KEYS, config.keys),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        _merge[(cdiv(tokens * q_heads, _MERGED_ROWS),)](
            partials,
            out,
            out.stride(0),
            base_two_scale,
            splits,
            tokens,
            HEADS=q_heads,
            HEAD_DIM=head_dim,
            DIM_BLOCK=dim_block,
            MOST_SPLITS=_MOST_SPLITS,
            MERGED_SPLITS=_MERGED_SPLITS,
            ROWS=_MERGED_ROWS,
            num_warps=4,
        )
    return out
