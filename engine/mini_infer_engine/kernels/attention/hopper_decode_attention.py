"""FlashDecoding on Hopper, in Gluon: computes the same as `decode_attention`, with less latency.

Between the GEMM for q, k and v and the one for o, a layer of few rows reads keys and values in 1 to 5 us. The rest is
latency, of memory and of instructions that depend on each other, which this kernel reduces:

- Keys and values are copied to shared memory before the wait for q, and nothing waits for them before they are
  multiplied. Their first page is in the plan, so that no page table is read first.
- RMSNorm and rotary embedding are computed only for the query heads that exist, each in one warp; the tile of 16 that
  tensor cores need is made in shared memory.
- All data that the kernel before writes is loaded at once.
- Splits are merged (FlashDecoding's second phase) with one load of their maxima and sums, while their accumulators are
  in flight; each warp adds up its own heads.
- Programs without work end at once, and leave their shared memory to the next GEMM.

At batch 1 and 512 tokens `qkv`, attention and `o` take 10.7 us a layer of a 0.6B shape on an H100 where they took 14.2,
33.3 of an 8B shape instead of 36.9, and 26.2 of a 7B shape instead of 30.8
(benchmarks/results/2026-11-27-decode-attention.md).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from mini_infer_engine.kernels.attention.decode_plan import FIELDS, MAX_SPLITS, NO_WINDOW, DecodePlan
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.pdl import grid_dependency_wait, launch_dependents
from mini_infer_engine.kernels.sizes import LOG2_E, next_power_of_2
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

HEAD_ROWS = gl.constexpr(16)
"""Query heads in a tile: M of the tensor cores' instruction. A KV head has no more."""
STATISTICS = gl.constexpr(4)
"""Floats after the accumulator of a head of a split: its maximum and sum, and two for an alignment of 16 bytes."""
_LOG2_E = gl.constexpr(LOG2_E)
_MERGED_VALUES = 64
"""Accumulator values that a thread loads at a time when splits are merged."""


@gluon.jit
def _fetch(head_pool, page, start, end, page_stride, kv_stride, token_stride, keys, values, stage,
           PAGE_SIZE: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Begins to copy the keys and values of a block, tokens from `start` on, into a stage; zeros from `end` on."""
    block: gl.constexpr = keys.shape[1]
    head_dim: gl.constexpr = keys.shape[2]
    if start < end:
        tokens = gl.arange(0, block, gl.SliceLayout(1, layout))
        dims = gl.arange(0, head_dim, gl.SliceLayout(0, layout))
        offsets = (tokens * token_stride)[:, None] + dims[None, :]
        at = head_pool + page.to(gl.int64) * page_stride + (start % PAGE_SIZE) * token_stride
        mask = (start + tokens < end)[:, None]
        async_copy.async_copy_global_to_shared(keys.index(stage), at + offsets, mask=mask)
        async_copy.async_copy_global_to_shared(values.index(stage), at + kv_stride + offsets, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _rotated(first, second, first_weights, second_weights, cos, sin, eps, HEAD_DIM: gl.constexpr, NORM: gl.constexpr):
    """Applies RMSNorm and rotary embedding to heads, from halves of elements to halves: [heads, HEAD_DIM / 2] fp32."""
    first = first.to(gl.float32)
    second = second.to(gl.float32)
    if NORM:
        scale = gl.rsqrt(gl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)
        first = first * scale[:, None] * first_weights[None, :]
        second = second * scale[:, None] * second_weights[None, :]
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@gluon.jit
def _merged(first, splits, stride, GROUP: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
            SPLITS: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Merges the splits of a row's query heads, `stride` floats apart, into [ROWS, HEAD_DIM] fp32.

    SPLITS accumulators are loaded at a time.
    """
    record: gl.constexpr = HEAD_DIM + STATISTICS
    warps: gl.constexpr = gl.num_warps()
    # A lane has whole splits, so that maxima and sums over all of them stay in a warp.
    by_split: gl.constexpr = gl.BlockedLayout([MAX_SPLITS // 32, max(1, ROWS // warps)], [32, 1], [1, warps], [0, 1])
    every_split = gl.arange(0, MAX_SPLITS, gl.SliceLayout(1, by_split))
    every_row = gl.arange(0, ROWS, gl.SliceLayout(0, by_split))
    maxima_at = first + (every_split * stride)[:, None] + (every_row * record)[None, :] + HEAD_DIM
    there = (every_split < splits)[:, None] & (every_row < GROUP)[None, :]
    maxima = gl.load(maxima_at, mask=there, other=float("-inf"), cache_modifier=".cg")
    sums = gl.load(maxima_at + 1, mask=there, other=0.0, cache_modifier=".cg")

    split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    acc_at = first + split * stride + row * record + dims
    accs = gl.load(acc_at, mask=(split < splits) & (row < GROUP), other=0.0, cache_modifier=".cg")

    in_group = every_row < GROUP
    maximum = gl.where(in_group, gl.max(maxima, axis=0), 0.0)
    weights = gl.exp2(maxima - maximum[None, :])
    weights = weights / gl.where(in_group, gl.sum(sums * weights, axis=0), 1.0)[None, :]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared = gl.allocate_shared_memory(gl.float32, [MAX_SPLITS // SPLITS, SPLITS, ROWS], plain)
    shared._reinterpret(gl.float32, [MAX_SPLITS, ROWS], plain).store(weights)
    gl.thread_barrier()
    result = gl.sum(accs * shared.index(0).load(gl.SliceLayout(2, layout))[:, :, None], axis=0)
    for start in range(SPLITS, splits, SPLITS):
        mask = (start + split < splits) & (row < GROUP)
        accs = gl.load(acc_at + start * stride, mask=mask, other=0.0, cache_modifier=".cg")
        result += gl.sum(accs * shared.index(start // SPLITS).load(gl.SliceLayout(2, layout))[:, :, None], axis=0)
    return result


@gluon.jit(do_not_specialize=["table_stride", "head_stride"], do_not_specialize_on_alignment=["page_tables"])
def _hopper_decode_attention(
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
    window,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    NORM: gl.constexpr,
    SINKS: gl.constexpr,
    WINDOWED: gl.constexpr,
    MERGE: gl.constexpr,
    MERGE_SPLITS: gl.constexpr,
    EARLY: gl.constexpr,
    BY_HEAD: gl.constexpr,
):
    """Split-KV: one program per (KV head, entry of the plan). A row's last split to arrive merges all of them.

    scale: of scores whose weights are powers of two. ROWS: the query heads of a KV head, or a few more. EARLY and
    BY_HEAD: as in `decode_attention._decode_attention`.
    """
    launch_dependents()
    if not EARLY:
        grid_dependency_wait()
    warps: gl.constexpr = gl.num_warps()
    half: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = qkv.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8])
    of_head: gl.constexpr = gl.SliceLayout(1, mma)
    of_column: gl.constexpr = gl.SliceLayout(0, mma)
    head_a_warp: gl.constexpr = gl.BlockedLayout([1, half // 32], [1, 32], [warps, 1], [1, 0])
    in_half: gl.constexpr = gl.SliceLayout(0, head_a_warp)
    chunks_of_row: gl.constexpr = HEAD_DIM // 8  # of 16 bytes, as many as a thread copies at a time
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [32 // chunks_of_row, chunks_of_row], [warps, 1], [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])

    kv_head = gl.program_id(0)
    program = gl.program_id(1)
    entry = plan + program * FIELDS
    row = gl.load(entry).to(gl.int64)
    if row < 0:
        if EARLY and program == 0:  # no kernel ends before the one before it, whichever programs have work
            grid_dependency_wait()
        return
    table = page_tables + gl.load(entry + 1).to(gl.int64) * table_stride
    kv_length = gl.load(entry + 2)  # before the new token, whose cache index it is
    begin = gl.load(entry + 3)
    end = gl.load(entry + 4)
    split = gl.load(entry + 5)
    splits = gl.load(entry + 6)
    position = gl.load(entry + 7)
    if BY_HEAD:
        table += kv_head * head_stride
        first_page = gl.load(table + begin // PAGE_SIZE)
        new_page = gl.load(table + kv_length // PAGE_SIZE).to(gl.int64)
    else:
        first_page = gl.load(entry + 8)
        new_page = gl.load(entry + 9).to(gl.int64)

    head_pool = pool + kv_head * HEAD_DIM
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], swizzled)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], swizzled)
    for ahead in gl.static_range(STAGES):
        start = begin + ahead * BLOCK
        page = first_page
        if ahead > 0:
            page = gl.load(table + start // PAGE_SIZE, mask=start < end, other=0)
        _fetch(head_pool, page, start, end, page_stride, kv_stride, token_stride, keys, values, ahead,
               PAGE_SIZE, copies)  # fmt: skip
    dims = gl.arange(0, half, in_half)
    angles = cos_sin + position.to(gl.int64) * HEAD_DIM + dims
    cos = gl.load(angles).to(gl.float32)
    sin = gl.load(angles + half).to(gl.float32)
    q_first = cos
    q_second = cos
    k_first = cos
    k_second = cos
    if NORM:
        q_first = gl.load(q_norm + dims).to(gl.float32)
        q_second = gl.load(q_norm + half + dims).to(gl.float32)
        k_first = gl.load(k_norm + dims).to(gl.float32)
        k_second = gl.load(k_norm + half + dims).to(gl.float32)
    head = gl.arange(0, ROWS, gl.SliceLayout(1, head_a_warp))
    one = gl.arange(0, 1, gl.SliceLayout(1, head_a_warp))
    columns = gl.arange(0, HEAD_DIM, of_column)
    of_row = qkv + row * qkv_stride
    q_at = of_row + ((kv_head * GROUP + head) * HEAD_DIM)[:, None] + dims[None, :]
    k_at = of_row + ((KV_HEADS * GROUP + kv_head + one) * HEAD_DIM)[:, None] + dims[None, :]
    v_at = of_row + (KV_HEADS * GROUP + KV_HEADS + kv_head) * HEAD_DIM + columns
    in_group = (head < GROUP)[:, None]
    new_at = head_pool + new_page * page_stride + (kv_length % PAGE_SIZE) * token_stride
    # The last split has the new token, and attends to it from registers, so that no split waits for the write.
    is_last_split = split == splits - 1
    q_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, ROWS), [1, 0])
    q_shared = gl.allocate_shared_memory(dtype, [HEAD_ROWS, HEAD_DIM], q_layout)
    scores_shared = gl.allocate_shared_memory(gl.float32, [HEAD_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if EARLY:
        grid_dependency_wait()

    q_one = gl.load(q_at, mask=in_group, other=0.0)
    q_two = gl.load(q_at + half, mask=in_group, other=0.0)
    k_one = gl.load(k_at, mask=is_last_split, other=0.0)
    k_two = gl.load(k_at + half, mask=is_last_split, other=0.0)
    new_value = gl.load(v_at, mask=is_last_split, other=0.0)
    q_one, q_two = _rotated(q_one, q_two, q_first, q_second, cos, sin, eps, HEAD_DIM, NORM)
    k_one, k_two = _rotated(k_one, k_two, k_first, k_second, cos, sin, eps, HEAD_DIM, NORM)
    q_one = q_one.to(dtype)
    q_two = q_two.to(dtype)
    k_one = k_one.to(dtype)
    k_two = k_two.to(dtype)
    queries = gl.reshape(gl.permute(gl.join(q_one, q_two), (0, 2, 1)), [ROWS, HEAD_DIM])
    q_shared.slice(0, ROWS).store(queries)
    products = q_one.to(gl.float32) * k_one.to(gl.float32) + q_two.to(gl.float32) * k_two.to(gl.float32)
    scores_shared.slice(0, ROWS).store(gl.sum(products, axis=1) * scale)
    gl.store(new_at + one[:, None] + dims[None, :], k_one, mask=is_last_split)
    gl.store(new_at + one[:, None] + half + dims[None, :], k_two, mask=is_last_split)
    gl.store(new_at + kv_stride + columns, new_value, mask=is_last_split)

    gl.thread_barrier()
    q_operand = q_shared.load(gl.DotOperandLayout(0, mma, 2))
    new_score = scores_shared.load(of_head)
    m_i = gl.where(is_last_split, new_score, float("-inf"))
    acc = gl.zeros([HEAD_ROWS, HEAD_DIM], gl.float32, mma) + new_value.to(gl.float32)[None, :]
    sums = gl.zeros([HEAD_ROWS, BLOCK], gl.float32, mma)  # of weights: threads add them up once, at the end
    tokens = gl.arange(0, BLOCK, of_column)
    for start in range(begin, end, BLOCK):
        stage = (start - begin) // BLOCK % STAGES
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()
        k_operand = keys.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
        v_operand = values.index(stage).load(gl.DotOperandLayout(1, mma, 2))
        scores = mma_v2(q_operand, k_operand, gl.zeros([HEAD_ROWS, BLOCK], gl.float32, mma)) * scale
        inside = start + tokens < end
        if WINDOWED:
            inside = inside & (start + tokens > kv_length - window)
        scores = gl.where(inside[None, :], scores, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(scores, axis=1))
        p = gl.exp2(scores - m_new[:, None])
        alpha = gl.exp2(m_i - m_new)[:, None]
        sums = sums * alpha + p
        acc = mma_v2(gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, mma, 2)), v_operand, acc * alpha)
        m_i = m_new
        next_start = start + STAGES * BLOCK
        page = gl.load(table + next_start // PAGE_SIZE, mask=next_start < end, other=0)
        gl.thread_barrier()
        _fetch(head_pool, page, next_start, end, page_stride, kv_stride, token_stride, keys, values, stage,
               PAGE_SIZE, copies)  # fmt: skip
    l_i = gl.sum(sums, axis=1) + gl.where(is_last_split, gl.exp2(new_score - m_i), 0.0)
    heads = gl.arange(0, HEAD_ROWS, of_head)
    if SINKS:
        # A sink beyond every score by 2 ** 128 has all of the weight: the sum is infinite then.
        sink = gl.load(sinks + kv_head * GROUP + heads, mask=heads < GROUP, other=float("-inf")).to(gl.float32)
        l_i += gl.where(is_last_split, gl.exp2(sink * _LOG2_E - m_i), 0.0)

    out_at = out + row * out_stride + kv_head * (GROUP * HEAD_DIM)
    if not MERGE or splits == 1:
        result = (acc / l_i[:, None]).to(dtype)
        gl.store(out_at + (heads * HEAD_DIM)[:, None] + columns[None, :], result, mask=(heads < GROUP)[:, None])
    else:
        record: gl.constexpr = HEAD_DIM + STATISTICS
        stride: gl.constexpr = KV_HEADS * GROUP * record
        first = partials + (program - split).to(gl.int64) * stride + kv_head * (GROUP * record)
        own = first + split * stride + heads * record
        gl.store(own[:, None] + columns[None, :], acc, mask=(heads < GROUP)[:, None])
        gl.store(own + HEAD_DIM, m_i, mask=heads < GROUP)
        gl.store(own + HEAD_DIM + 1, l_i, mask=heads < GROUP)
        gl.thread_barrier()
        counter = counters + row * KV_HEADS + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            warps_of_rows: gl.constexpr = min(ROWS, warps)
            warps_of_dims: gl.constexpr = warps // warps_of_rows
            vector: gl.constexpr = max(1, min(4, HEAD_DIM // (32 * warps_of_dims)))
            layout: gl.constexpr = gl.BlockedLayout(
                [1, 1, vector], [1, 1, 32], [1, warps_of_rows, warps_of_dims], [2, 1, 0]
            )
            merged = _merged(first, splits, stride, GROUP, ROWS, HEAD_DIM, MERGE_SPLITS, layout)
            merged_row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(0, layout)))[:, None]
            merged_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :]
            gl.store(out_at + merged_row * HEAD_DIM + merged_dim, merged.to(dtype), mask=merged_row < GROUP)
            gl.store(counter, 0)


def hopper_decode_attention(
    qkv: torch.Tensor,
    rotation: Rotation,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    sinks: torch.Tensor | None,
    workspace: Workspace,
    out: torch.Tensor,
    early: bool,
) -> None:
    """Computes `decode_attention.decode_attention` for shapes that have an `attention_config.hopper_decode_block`.

    sinks: logits [q_heads] of `sinks.add_sinks`, or None.

    If `early` allows reading the plan before the wait, keys and values of tokens before the new one are read there,
    too: they were written in earlier passes, which have ended when a plan is made.
    """
    rows = qkv.shape[0]
    _, _, page_size, kv_heads, head_dim = pool.shape
    programs, warps = plan.entries.shape[0], plan.config.warps
    group = qkv.shape[1] // head_dim // kv_heads - 2
    tile_rows = max(next_power_of_2(group), warps)
    merge_splits = min(MAX_SPLITS.value, max(1, _MERGED_VALUES * 32 * warps // (tile_rows * head_dim)))
    partial_floats = programs * kv_heads * group * (head_dim + STATISTICS.value) if plan.splits else 0
    assert not plan.splits or rows * kv_heads <= COUNTERS
    _hopper_decode_attention[(kv_heads, programs)](
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
        scale * LOG2_E,
        plan.sliding_window or NO_WINDOW,
        GROUP=group,
        ROWS=tile_rows,
        HEAD_DIM=head_dim,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        BLOCK=plan.config.block_tokens,
        STAGES=plan.config.stages,
        NORM=rotation.q_norm is not None,
        SINKS=sinks is not None,
        WINDOWED=plan.sliding_window is not None,
        MERGE=plan.splits,
        MERGE_SPLITS=merge_splits,
        EARLY=early,
        BY_HEAD=page_tables.dim() == 3,
        num_warps=warps,
        launch_pdl=True,
    )
