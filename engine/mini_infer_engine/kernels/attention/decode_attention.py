"""FlashDecoding (Dao et al. 2023, "Flash-Decoding for long-context inference"): split-KV attention of one new token per
sequence over paged keys and values, fused with the operations before it.

Those are RMSNorm of q and k heads (if a model has it), rotary embedding, and the write of k and v into their page. The
query heads of a KV head share a tile; any page size. The split that arrives last merges all of a row.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mini_infer_engine.kernels.attention.attention_config import MANY_HEAD_ROWS
from mini_infer_engine.kernels.attention.decode_plan import FIELDS, MAX_SPLITS, NO_WINDOW, DecodePlan
from mini_infer_engine.kernels.attention.page_ids import page_ids
from mini_infer_engine.kernels.attention.quantized_decode import UNIT, scan_quantized
from mini_infer_engine.kernels.attention.quantized_rows import first_scale, rounded_rows, row_scales
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.attention.sinks import add_sinks
from mini_infer_engine.kernels.attention.softcap import softcapped
from mini_infer_engine.kernels.sizes import next_power_of_2
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

_MAX_ROUNDS: tl.constexpr = tl.constexpr(5)
"""Rounds of `_merge_splits`, which run one after another.

More splits are merged by `_merge_many_splits`, whose first round begins later.
"""
_EARLY_BLOCKS: tl.constexpr = tl.constexpr(2)
"""Blocks of keys that a program prefetches before it waits: all of a short sequence's. No more fit the L2 cache."""
_MERGE_VALUES = 4096
"""Accumulator values of the splits in one round; twice as many take registers that the main loop needs."""
_VALUES_PER_THREAD = 64
"""Accumulator values that a thread loads at a time if splits are many: it keeps twice as many while it adds."""
_MOST_BLOCK_BYTES = 64 << 10
"""Bytes of a block of keys, which fits in shared memory beside its values in two stages. Splits consist of whole blocks
of the plan, which are multiples of smaller ones.
"""


@triton.jit
def _to_l2(at):
    """Prefetches 128 bytes around each of these pointers, of any shape, into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _keys_to_l2(table, head_pool, begin, end, page_stride, kv_stride, token_stride,
                HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
                BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Prefetches the first BLOCKS blocks of keys and values of a split into the L2 cache."""
    line: tl.constexpr = 128 // (head_pool.dtype.element_ty.primitive_bitwidth // 8)
    lines_of_head: tl.constexpr = DIM_BLOCK // line if line < DIM_BLOCK else 1  # a power of two, as DIM_BLOCK is
    lines = tl.minimum(tl.arange(0, lines_of_head) * line, HEAD_DIM - 1)
    for block in tl.static_range(BLOCKS):
        start = begin + block * BLOCK
        tokens = tl.maximum(tl.minimum(start + tl.arange(0, BLOCK), end - 1), 0)
        pages = tl.load(table + tokens // PAGE_SIZE).to(tl.int64)
        at = head_pool + pages * page_stride + (tokens % PAGE_SIZE) * token_stride
        _to_l2(at[:, None] + lines[None, :])
        _to_l2(at[:, None] + kv_stride + lines[None, :])


@triton.jit
def rotated(
    head_at,
    mask,
    norm,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Applies RMSNorm and rotary embedding to heads at pointers [heads, 1]. Returns [heads, DIM_BLOCK] fp32.

    Each element is loaded beside the other of its pair, so that both halves stay in one tile.
    """
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, DIM_BLOCK)[None, :]
    paired_dims = tl.where(dims < half, dims + half, dims - half)
    x = tl.load(head_at + dims, mask=mask, other=0.0).to(tl.float32)
    x_paired = tl.load(head_at + paired_dims, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x *= scale * tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        x_paired *= scale * tl.load(norm + paired_dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    return x * cos + tl.where(dims < half, -x_paired, x_paired) * sin


@triton.jit
def _merge_splits(first, splits, stride, GROUP: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr,
            SPLITS: tl.constexpr):  # fmt: skip
    """FlashDecoding's second phase: merges a row's splits, `stride` floats apart, into [ROWS, DIM_BLOCK] fp32.

    It merges SPLITS at a time, with the online softmax's rescaling between rounds.
    """
    rows = tl.arange(0, ROWS)[None, :]
    m_i = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    for start in range(0, splits, SPLITS):
        index = start + tl.arange(0, SPLITS)[:, None]
        mask = (index < splits) & (rows < GROUP)
        split_at = first + index * stride + rows
        m_at = split_at + GROUP * DIM_BLOCK
        acc_at = (split_at + rows * (DIM_BLOCK - 1))[:, :, None] + tl.arange(0, DIM_BLOCK)[None, None, :]
        m_splits = tl.load(m_at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        l_splits = tl.load(m_at + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        acc_splits = tl.load(acc_at, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m_i, tl.max(m_splits, axis=0))
        weights, alpha = tl.exp2(m_splits - m_new[None, :]), tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(l_splits * weights, axis=0)
        acc = acc * alpha[:, None] + tl.sum(acc_splits * weights[:, :, None], axis=0)
        m_i = m_new
    return acc / l_i[:, None]


@triton.jit
def _load_splits(acc_at, m_at, start, splits, stride, in_group, COUNT: tl.constexpr):
    """Loads accumulators [COUNT, ROWS, DIM_BLOCK] and row maxima m_i [COUNT, ROWS] of the splits from `start` on."""
    index = start + tl.arange(0, COUNT)[:, None]
    mask = (index < splits) & in_group
    acc_splits = tl.load(acc_at + (index * stride)[:, :, None], mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
    return acc_splits, tl.load(m_at + index * stride, mask=mask, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _merge_many_splits(first, splits, stride, GROUP: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 SPLITS: tl.constexpr):  # fmt: skip
    """Merges splits like `_merge_splits`, but loads the maxima of all splits first, so that nothing is rescaled.

    SPLITS accumulators are loaded ahead of those that are being added; threads reduce among each other once, at the
    end.
    """
    rows = tl.arange(0, ROWS)[None, :]
    in_group = rows < GROUP
    m_at = first + GROUP * DIM_BLOCK + rows
    # Not rows * DIM_BLOCK: Triton would see that they are aligned, load 16 bytes at a time, and with that lay a head's
    # splits out over several warps, so that each sum crosses shared memory.
    acc_at = (first + rows + rows * (DIM_BLOCK - 1))[:, :, None] + tl.arange(0, DIM_BLOCK)[None, None, :]
    acc_splits, m_splits = _load_splits(acc_at, m_at, 0, splits, stride, in_group, SPLITS)
    index = tl.arange(0, MAX_SPLITS)[:, None]
    mask = (index < splits) & in_group
    m_all = tl.load(m_at + index * stride, mask=mask, other=float("-inf"), cache_modifier=".cg")
    l_splits = tl.load(m_at + index * stride + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
    m_i = tl.where(in_group, tl.max(m_all, axis=0)[None, :], 0.0)
    l_i = tl.where(in_group, tl.sum(l_splits * tl.exp2(m_all - m_i), axis=0)[None, :], 1.0)
    acc = tl.zeros((SPLITS, ROWS, DIM_BLOCK), dtype=tl.float32)
    for start in range(SPLITS, splits + SPLITS, SPLITS):
        acc += acc_splits * tl.exp2(m_splits - m_i)[:, :, None]
        acc_splits, m_splits = _load_splits(acc_at, m_at, start, splits, stride, in_group, SPLITS)
    return tl.sum(acc, axis=0) / tl.trans(l_i)


@triton.jit(do_not_specialize=["table_stride", "head_stride"], do_not_specialize_on_alignment=["page_tables"])
def _decode_attention(
    qkv,
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
    head_stride,
    out_stride,
    eps,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    MANY_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """Split-KV: one program per (KV head, entry of the plan). A row's last split to arrive merges all of them.

    BY_HEAD: each KV head has a page table of its own. EARLY: data that does not depend on this layer's q, k and v is
    read before the wait for the kernel that makes them.
    """
    if PDL:  # see pdl_gemm: the GEMM that comes next may fetch its weights now
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    entry = plan + program * FIELDS
    row = tl.load(entry).to(tl.int64)
    if row < 0:
        if EARLY:
            gdc_wait()  # no kernel ends before the one before it
        return
    table = page_tables + tl.load(entry + 1).to(tl.int64) * table_stride
    if BY_HEAD:
        table += kv_head * head_stride
    kv_length = tl.load(entry + 2)  # before the new token, whose cache index it is
    begin = tl.load(entry + 3)
    end = tl.load(entry + 4)
    split = tl.load(entry + 5)
    splits = tl.load(entry + 6)
    position = tl.load(entry + 7)

    half: tl.constexpr = HEAD_DIM // 2
    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims[None, :] < HEAD_DIM
    angle = cos_sin + position.to(tl.int64) * HEAD_DIM + tl.where(dims < half, dims, dims - half)[None, :]
    cos = tl.load(angle, mask=dim_inside, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=dim_inside, other=0.0).to(tl.float32)
    head_pool = pool + kv_head * HEAD_DIM
    new_page = tl.load(table + kv_length // PAGE_SIZE).to(tl.int64)
    if EARLY:
        _keys_to_l2(table, head_pool, begin, end, page_stride, kv_stride, token_stride,
                    HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, _EARLY_BLOCKS)  # fmt: skip
        gdc_wait()
    q_heads = qkv + row * qkv_stride + (kv_head * GROUP + heads)[:, None] * HEAD_DIM
    q_inside = (heads < GROUP)[:, None] & dim_inside
    queries = rotated(q_heads, q_inside, q_norm, cos, sin, eps, HEAD_DIM, DIM_BLOCK, NORM).to(qkv.dtype.element_ty)

    # The last split has the new token, and attends to it from registers, so that no split waits for the write.
    is_last_split = split == splits - 1
    new_inside = dim_inside & is_last_split
    k_head = qkv + row * qkv_stride + (KV_HEADS * GROUP + kv_head + tl.arange(0, 1))[:, None] * HEAD_DIM
    new_key = rotated(k_head, new_inside, k_norm, cos, sin, eps, HEAD_DIM, DIM_BLOCK, NORM).to(qkv.dtype.element_ty)
    new_value = tl.load(k_head + KV_HEADS * HEAD_DIM + dims[None, :], mask=new_inside, other=0.0)
    kv_dtype: tl.constexpr = pool.dtype.element_ty
    quantized: tl.constexpr = kv_dtype.primitive_bitwidth == 8
    new_at = head_pool + new_page * page_stride + (kv_length % PAGE_SIZE) * token_stride + dims[None, :]
    if quantized:
        largest: tl.constexpr = 127.0 if kv_dtype == tl.int8 else 448.0
        wide_key, wide_value = new_key.to(tl.float32), new_value.to(tl.float32)
        key_scale, value_scale = row_scales(wide_key, largest), row_scales(wide_value, largest)
        stored_key = rounded_rows(wide_key, key_scale, kv_dtype, largest)
        stored_value = rounded_rows(wide_value, value_scale, kv_dtype, largest)
        tl.store(new_at, stored_key, mask=new_inside)
        tl.store(new_at + kv_stride, stored_value, mask=new_inside)
        scale_pool = first_scale(pool, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        new_scale_at = scale_pool + new_page * (page_stride // 2) + kv_length % PAGE_SIZE + tl.arange(0, 1)
        tl.store(new_scale_at, key_scale.to(tl.bfloat16), mask=is_last_split)
        tl.store(new_scale_at + kv_stride // 2, value_scale.to(tl.bfloat16), mask=is_last_split)
        # What later tokens will read of it.
        new_key = stored_key.to(tl.float32) * key_scale[:, None]
        new_value = stored_value.to(tl.float32) * value_scale[:, None]
    else:
        tl.store(new_at, new_key, mask=new_inside)
        tl.store(new_at + kv_stride, new_value, mask=new_inside)

    log2e: tl.constexpr = 1.4426950408889634
    new_score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32), axis=1)
    new_score = softcapped(new_score * scale, softcap) * log2e if SOFTCAP else new_score * (scale * log2e)
    if quantized:
        acc, l_i, m_i = scan_quantized(
            queries, new_score, new_value, is_last_split, table, head_pool, scale_pool, begin, end, kv_length, window,
            page_stride, kv_stride, token_stride, scale, softcap, GROUP_BLOCK, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK,
            WINDOWED, SOFTCAP, PRECISION,
        )  # fmt: skip
    else:
        m_i = tl.where(is_last_split, new_score, float("-inf"))
        l_i = tl.zeros((GROUP_BLOCK,), dtype=tl.float32) + tl.where(is_last_split, 1.0, 0.0)
        acc = tl.zeros((GROUP_BLOCK, DIM_BLOCK), dtype=tl.float32) + new_value.to(tl.float32)
        offs_block = tl.arange(0, BLOCK)
        pages = page_ids(table, begin, kv_length, PAGE_SIZE, BLOCK)
        for start in range(begin, end, BLOCK):
            tokens = start + offs_block
            if PAGE_SIZE % BLOCK == 0:
                at = pages * page_stride + (start % PAGE_SIZE + offs_block) * token_stride
            else:
                at = pages * page_stride + (tokens % PAGE_SIZE) * token_stride
            # Of the next block: keys do not wait for it.
            pages = page_ids(table, start + BLOCK, kv_length, PAGE_SIZE, BLOCK)
            mask = (tokens < end) & (tokens > kv_length - window)
            kv_mask = mask[:, None] & dim_inside
            keys = tl.load(head_pool + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION)
            scores = softcapped(scores * scale, softcap) * log2e if SOFTCAP else scores * (scale * log2e)
            scores = tl.where(mask[None, :], scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, axis=1))
            p = tl.exp2(scores - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            values = tl.load(head_pool + kv_stride + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
            values = values.to(queries.dtype)
            acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
            m_i = m_new

    if sinks is not None:
        has_sink = (heads < GROUP) & is_last_split
        logits = tl.load(sinks + kv_head * GROUP + heads, mask=has_sink, other=float("-inf")).to(tl.float32)
        acc, l_i, m_i = add_sinks(acc, l_i, m_i, logits, 1.0, UNIT if quantized else 1.0)

    out_at = out + row * out_stride + kv_head * GROUP * HEAD_DIM
    if not MERGE or splits == 1:
        result = (acc / l_i[:, None]).to(out.dtype.element_ty)
        tl.store(out_at + heads[:, None] * HEAD_DIM + dims[None, :], result, mask=q_inside)
    else:
        # A partial result is acc [GROUP, DIM_BLOCK], then m_i [GROUP] and l_i [GROUP].
        split_floats: tl.constexpr = GROUP * (DIM_BLOCK + 2)
        stride: tl.constexpr = KV_HEADS * split_floats
        counter = row * KV_HEADS + kv_head
        first_partials = partials + (program - split).to(tl.int64) * stride + kv_head * split_floats
        own_partials = first_partials + split.to(tl.int64) * stride
        tl.store(own_partials + heads[:, None] * DIM_BLOCK + dims[None, :], acc, mask=(heads < GROUP)[:, None])
        tl.store(own_partials + GROUP * DIM_BLOCK + heads, m_i, mask=heads < GROUP)
        tl.store(own_partials + GROUP * (DIM_BLOCK + 1) + heads, l_i, mask=heads < GROUP)
        tl.debug_barrier()
        if tl.atomic_add(counters + counter, 1, sem="acq_rel") == splits - 1:
            rows = tl.arange(0, MERGE_ROWS)
            merged_at = out_at + rows[:, None] * HEAD_DIM + dims[None, :]
            merged_mask = (rows < GROUP)[:, None] & dim_inside
            if MANY_SPLITS == 0 or splits <= _MAX_ROUNDS * MERGE_SPLITS:
                result = _merge_splits(first_partials, splits, stride, GROUP, DIM_BLOCK, MERGE_ROWS, MERGE_SPLITS)
                tl.store(merged_at, result.to(out.dtype.element_ty), mask=merged_mask)
            else:
                result_of_many = _merge_many_splits(
                    first_partials, splits, stride, GROUP, DIM_BLOCK, MERGE_ROWS, MANY_SPLITS
                )
                tl.store(merged_at, result_of_many.to(out.dtype.element_ty), mask=merged_mask)
            tl.store(counters + counter, 0)


def decode_attention(
    qkv: torch.Tensor,
    rotation: Rotation,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    workspace: Workspace,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Writes the new token of each sequence into its page, and attends from it over all tokens up to it.

    qkv [rows, (q_heads + 2 kv_heads) * head_dim] before norm and rotation (rows may be strided; not changed); pool: one
    layer's view [pages, 2, page_size, kv_heads, head_dim], of qkv's dtype or of one byte an element (as `rope_kv`
    documents; the new token then attends to itself in its stored precision, too); page_tables [slots, width] int32,
    or [slots, kv_heads, width] if each head reads pages of its own, read at the plan's slots. The plan is of the same
    rows. Returns [rows, q_heads * head_dim], in `out` if given.

    softcap: the cap of `softcap.softcapped`, or None for none. sinks: logits [q_heads] of `sinks.add_sinks`, or None.
    early: plan and page tables were written by kernels that
    have ended when the kernel before this one begins, and are read before the wait for it. Keys and values are only
    prefetched into the L2 cache there, which returns the latest data whenever they are read.
    """
    rows = qkv.shape[0]
    _, _, page_size, kv_heads, head_dim = pool.shape
    programs = plan.entries.shape[0]
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    group = q_heads // kv_heads
    dim_block = next_power_of_2(head_dim)
    merge_rows = next_power_of_2(group)
    if out is None:
        out = torch.empty((rows, q_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return out
    if plan.config.hopper:
        assert softcap is None, "the kernel for Hopper does not cap scores: KernelPolicy.decode_config"
        from mini_infer_engine.kernels.attention.hopper_decode_attention import hopper_decode_attention

        hopper_decode_attention(
            qkv,
            rotation,
            pool,
            page_tables,
            plan,
            scale=scale,
            sinks=sinks,
            workspace=workspace,
            out=out,
            early=early,
        )
        return out
    partial_floats = programs * kv_heads * group * (dim_block + 2) if plan.splits else 0
    are_few = rows * kv_heads < MANY_HEAD_ROWS
    # Merging many splits takes registers, so that no third program fits on an SM. That helps models with few query
    # heads a KV head as well, which never have so many splits: with PDL, three programs would crowd each SM that the
    # GEMM before has left, and the other SMs would have one (8 x 4,096 tokens of 0.6B: 9 % of a step).
    many_splits = _VALUES_PER_THREAD * 32 * plan.config.warps // (merge_rows * dim_block)
    assert not plan.splits or rows * kv_heads <= COUNTERS
    quantized = pool.dtype.itemsize == 1
    _decode_attention[(kv_heads, programs)](
        qkv,
        rotation.cos_sin,
        rotation.q_norm,
        rotation.k_norm,
        sinks,
        pool,
        page_tables,
        plan.entries,
        out,
        workspace.partials(partial_floats),
        workspace.counters,
        qkv.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        page_tables.stride(0),
        page_tables.stride(1),
        out.stride(0),
        rotation.eps,
        scale,
        softcap or 0.0,
        plan.sliding_window or NO_WINDOW,
        GROUP=group,
        GROUP_BLOCK=max(8 if quantized else 16, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        BLOCK=min(plan.config.block_tokens, _MOST_BLOCK_BYTES // (dim_block * pool.itemsize)),
        NORM=rotation.q_norm is not None,
        WINDOWED=plan.sliding_window is not None or not quantized,
        SOFTCAP=softcap is not None,
        MERGE=plan.splits,
        MERGE_ROWS=merge_rows,
        MERGE_SPLITS=max(2, _MERGE_VALUES // (merge_rows * dim_block)),
        MANY_SPLITS=max(1, min(many_splits, MAX_SPLITS.value)) if are_few else 0,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        PDL=plan.config.pdl,
        EARLY=plan.config.pdl and early and rotation.q_norm is None,  # with norms 8 rows of 0.6B took 1.6 % longer
        BY_HEAD=page_tables.dim() == 3,
        launch_pdl=plan.config.pdl,
        num_warps=plan.config.warps,
        num_stages=plan.config.stages if dim_block * qkv.itemsize <= 512 else 2,  # of wide heads no more would fit
    )
    return out
