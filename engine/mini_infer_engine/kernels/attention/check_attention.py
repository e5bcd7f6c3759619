"""FlashDecoding (Dao et al. 2023, "Flash-Decoding for long-context inference") of the same few new tokens of each
sequence, as speculative decoding verifies them: split-KV attention over paged keys and values in one kernel.

As in `decode_attention`, RMSNorm of q and k heads, rotary embedding and the write of k and v are fused with it. A tile
consists of (query, head) pairs that share a KV head, so that a sequence's new tokens load keys and values once.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mini_infer_engine.kernels.attention.decode_attention import rotated
from mini_infer_engine.kernels.attention.decode_plan import FIELDS, MAX_SPLITS, NO_WINDOW, DecodePlan
from mini_infer_engine.kernels.attention.page_ids import page_ids
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.attention.sinks import add_sinks
from mini_infer_engine.kernels.attention.softcap import softcapped
from mini_infer_engine.kernels.sizes import next_power_of_2
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

_LEAST_ROWS = 16
"""The least number of rows in an operand of the tensor cores."""
_VALUES_PER_WARP = 1024
"""Accumulator values of a tile per warp: the merge keeps three tiles in registers."""


@triton.jit
def _merge_tiles(first, splits, stride, ROWS: tl.constexpr, TILE: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """FlashDecoding's second phase: merges a tile's splits, `stride` floats apart, into [TILE, DIM_BLOCK] fp32.

    The maximum of all splits is known before anything is added; one split is loaded ahead of the one that is added.
    """
    rows = tl.arange(0, TILE)
    inside = rows < ROWS
    m_at = first + ROWS * DIM_BLOCK + rows
    acc_at = first + rows[:, None] * DIM_BLOCK + tl.arange(0, DIM_BLOCK)[None, :]
    ahead = tl.load(acc_at, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    m_ahead = tl.load(m_at, mask=inside, other=0.0, cache_modifier=".cg")
    index = tl.arange(0, MAX_SPLITS)[:, None]
    mask = (index < splits) & inside[None, :]
    m_all = tl.load(m_at[None, :] + index * stride, mask=mask, other=float("-inf"), cache_modifier=".cg")
    l_all = tl.load(m_at[None, :] + index * stride + ROWS, mask=mask, other=0.0, cache_modifier=".cg")
    m_i = tl.where(inside, tl.max(m_all, axis=0), 0.0)
    l_i = tl.where(inside, tl.sum(l_all * tl.exp2(m_all - m_i[None, :]), axis=0), 1.0)
    acc = tl.zeros((TILE, DIM_BLOCK), dtype=tl.float32)
    for split in range(1, splits + 1):
        acc += ahead * tl.exp2(m_ahead - m_i)[:, None]
        is_more = split < splits
        m_ahead = tl.load(m_at + split * stride, mask=inside & is_more, other=0.0, cache_modifier=".cg")
        ahead = tl.load(acc_at + split * stride, mask=inside[:, None] & is_more, other=0.0, cache_modifier=".cg")
    return acc / l_i[:, None]


@triton.jit(do_not_specialize=["table_stride"],
            do_not_specialize_on_alignment=["page_tables", "positions", "kv_index"])  # fmt: skip
def _check_attention(
    qkv,
    positions,
    kv_index,
    cos_sin,
    q_norm,
    k_norm,
    sinks,
    pool,
    page_tables,
    plan,
    out,
    partials,
    counters,
    qkv_stride,
    page_stride,
    kv_stride,
    token_stride,
    table_stride,
    out_stride,
    eps,
    scale,
    softcap,
    window,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NEW_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split-KV: one program per (KV head, entry of the plan). A sequence's last split to arrive merges all of them."""
    if PDL:  # see pdl_gemm: the GEMM that comes next may fetch its weights now
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    entry = plan + program * FIELDS
    row = tl.load(entry).to(tl.int64)
    if row < 0:
        return
    table = page_tables + tl.load(entry + 1).to(tl.int64) * table_stride
    cached = tl.load(entry + 2)  # tokens before the new ones
    begin = tl.load(entry + 3)
    end = tl.load(entry + 4)
    split = tl.load(entry + 5)
    splits = tl.load(entry + 6)

    half: tl.constexpr = HEAD_DIM // 2
    log2e: tl.constexpr = 1.4426950408889634
    pairs = tl.arange(0, TILE)
    inside = pairs < ROWS
    query, head = pairs // GROUP, kv_head * GROUP + pairs % GROUP
    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims[None, :] < HEAD_DIM
    angle_dims = tl.where(dims < half, dims, dims - half)[None, :]
    q_inside = inside[:, None] & dim_inside
    position = tl.load(positions + row * QUERIES + query, mask=inside, other=0).to(tl.int64)
    angle = cos_sin + position[:, None] * HEAD_DIM + angle_dims
    cos = tl.load(angle, mask=q_inside, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=q_inside, other=0.0).to(tl.float32)
    q_heads = qkv + (row * QUERIES + query)[:, None] * qkv_stride + head[:, None] * HEAD_DIM
    queries = rotated(q_heads, q_inside, q_norm, cos, sin, eps, HEAD_DIM, DIM_BLOCK, NORM)
    queries = queries.to(qkv.dtype.element_ty)

    m_i = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((TILE,), dtype=tl.float32)
    acc = tl.zeros((TILE, DIM_BLOCK), dtype=tl.float32)
    head_pool = pool + kv_head * HEAD_DIM
    # The last split has the new tokens, and attends to them from registers, so that no split waits for the write.
    if split == splits - 1:
        new = tl.arange(0, NEW_BLOCK)
        new_rows = row * QUERIES + new
        new_inside = (new < QUERIES)[:, None] & dim_inside
        new_position = tl.load(positions + new_rows, mask=new < QUERIES, other=0).to(tl.int64)
        new_angle = cos_sin + new_position[:, None] * HEAD_DIM + angle_dims
        new_cos = tl.load(new_angle, mask=new_inside, other=0.0).to(tl.float32)
        new_sin = tl.load(new_angle + half, mask=new_inside, other=0.0).to(tl.float32)
        k_heads = qkv + new_rows[:, None] * qkv_stride + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
        new_keys = rotated(k_heads, new_inside, k_norm, new_cos, new_sin, eps, HEAD_DIM, DIM_BLOCK, NORM)
        new_keys = new_keys.to(qkv.dtype.element_ty)
        new_values = tl.load(k_heads + KV_HEADS * HEAD_DIM + dims[None, :], mask=new_inside, other=0.0)
        index = tl.load(kv_index + new_rows, mask=new < QUERIES, other=-1).to(tl.int64)
        new_at = head_pool + ((index // PAGE_SIZE) * page_stride + (index % PAGE_SIZE) * token_stride)[:, None]
        written = (index >= 0)[:, None] & new_inside
        tl.store(new_at + dims[None, :], new_keys, mask=written)
        tl.store(new_at + kv_stride + dims[None, :], new_values, mask=written)
        scores = tl.dot(queries, tl.trans(new_keys), input_precision=PRECISION)
        scores = softcapped(scores * scale, softcap) * log2e if SOFTCAP else scores * (scale * log2e)
        ahead = query[:, None] - new[None, :]
        scores = tl.where((ahead >= 0) & (ahead < window), scores, float("-inf"))
        m_i = tl.max(scores, axis=1)
        p = tl.exp2(scores - m_i[:, None])
        l_i = tl.sum(p, axis=1)
        acc = tl.dot(p.to(new_values.dtype), new_values, acc, input_precision=PRECISION)

    offs_block = tl.arange(0, BLOCK)
    pages = page_ids(table, begin, cached, PAGE_SIZE, BLOCK)
    for start in range(begin, end, BLOCK):
        tokens = start + offs_block
        if PAGE_SIZE % BLOCK == 0:
            at = pages * page_stride + (start % PAGE_SIZE + offs_block) * token_stride
        else:
            at = pages * page_stride + (tokens % PAGE_SIZE) * token_stride
        # Of the next block: keys do not wait for it.
        pages = page_ids(table, start + BLOCK, cached, PAGE_SIZE, BLOCK)
        kv_mask = ((tokens < end) & (tokens > cached - window))[:, None] & dim_inside
        keys = tl.load(head_pool + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = softcapped(scores * scale, softcap) * log2e if SOFTCAP else scores * (scale * log2e)
        mask = (tokens < end)[None, :] & (tokens[None, :] > (cached - window + query)[:, None])
        scores = tl.where(mask, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a later query whose window begins behind these keys
        p = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        values = tl.load(head_pool + kv_stride + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new

    if sinks is not None:
        has_sink = inside & (split == splits - 1)
        logits = tl.load(sinks + head, mask=has_sink, other=float("-inf")).to(tl.float32)
        acc, l_i, m_i = add_sinks(acc, l_i, m_i, logits, 1.0, 1.0)

    out_at = out + (row * QUERIES + query)[:, None] * out_stride + head[:, None] * HEAD_DIM + dims[None, :]
    if not MERGE or splits == 1:
        tl.store(out_at, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=q_inside)
    else:
        # A partial result is acc [ROWS, DIM_BLOCK], then m_i [ROWS] and l_i [ROWS].
        split_floats: tl.constexpr = ROWS * (DIM_BLOCK + 2)
        stride: tl.constexpr = KV_HEADS * split_floats
        counter = row * KV_HEADS + kv_head
        first_partials = partials + (program - split).to(tl.int64) * stride + kv_head * split_floats
        own_partials = first_partials + split.to(tl.int64) * stride
        tl.store(own_partials + pairs[:, None] * DIM_BLOCK + dims[None, :], acc, mask=inside[:, None])
        tl.store(own_partials + ROWS * DIM_BLOCK + pairs, m_i, mask=inside)
        tl.store(own_partials + ROWS * (DIM_BLOCK + 1) + pairs, l_i, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(counters + counter, 1, sem="acq_rel") == splits - 1:
            result = _merge_tiles(first_partials, splits, stride, ROWS, TILE, DIM_BLOCK)
            tl.store(out_at, result.to(out.dtype.element_ty), mask=q_inside)
            tl.store(counters + counter, 0)


def check_tile_rows(queries: int, group: int) -> int:
    """Returns the rows of a tile, padding included, if `queries` new tokens of `group` heads share a KV head."""
    return max(_LEAST_ROWS, next_power_of_2(queries * group))


def check_attention(
    qkv: torch.Tensor,
    rotation: Rotation,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    plan: DecodePlan,
    positions: torch.Tensor,
    kv_index: torch.Tensor,
    *,
    queries: int,
    scale: float,
    workspace: Workspace,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the new tokens of each sequence into their pages, and attends from each over all tokens up to it.

    qkv [sequences * queries, (q_heads + 2 kv_heads) * head_dim] before norm and rotation (rows may be strided; not
    changed), sequence by sequence; positions and kv_index of the same tokens (page * page_size + offset, or -1: not
    written); pool: one layer's view [pages, 2, page_size, kv_heads, head_dim] of qkv's dtype; page_tables [slots,
    width] int32, read at the plan's slots. The plan is that of `plan_decode` for each sequence's first new token.
    Returns [sequences * queries, q_heads * head_dim], in `out` if given. softcap: the cap of `softcap.softcapped`, or
    None for none. sinks: logits [q_heads] of `sinks.add_sinks`, or None.
    """
    _, _, page_size, kv_heads, head_dim = pool.shape
    programs = plan.entries.shape[0]
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    group, sequences = q_heads // kv_heads, qkv.shape[0] // queries
    dim_block, tile = next_power_of_2(head_dim), check_tile_rows(queries, group)
    assert pool.dtype == qkv.dtype, "one-byte pages are attended to by prefill_attention"
    assert not plan.splits or sequences * kv_heads <= COUNTERS
    if out is None:
        out = torch.empty((qkv.shape[0], q_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    _check_attention[(kv_heads, programs)](
        qkv,
        positions,
        kv_index,
        rotation.cos_sin,
        rotation.q_norm,
        rotation.k_norm,
        sinks,
        pool,
        page_tables,
        plan.entries,
        out,
        workspace.partials(programs * kv_heads * queries * group * (dim_block + 2) if plan.splits else 0),
        workspace.counters,
        qkv.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        page_tables.stride(0),
        out.stride(0),
        rotation.eps,
        scale,
        softcap or 0.0,
        plan.sliding_window or NO_WINDOW,
        QUERIES=queries,
        GROUP=group,
        ROWS=queries * group,
        TILE=tile,
        NEW_BLOCK=max(_LEAST_ROWS, next_power_of_2(queries)),
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        BLOCK=plan.config.block_tokens,
        NORM=rotation.q_norm is not None,
        SOFTCAP=softcap is not None,
        MERGE=plan.splits,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        PDL=plan.config.pdl,
        launch_pdl=plan.config.pdl,
        num_warps=max(plan.config.warps, min(8, tile * dim_block // _VALUES_PER_WARP)),
        num_stages=plan.config.stages if dim_block * qkv.itemsize <= 512 else 2,  # of wide heads no more would fit
    )
    return out
