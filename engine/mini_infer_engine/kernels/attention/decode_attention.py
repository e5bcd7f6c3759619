"""Attention of one new token a sequence, from its q, k and v side by side to mixed values: norm of q and k heads (where
a model has it), rotary embedding, the write of k and v into their page, and split-K flash decoding (Dao et al. 2023,
"Flash-Decoding for long-context inference") over paged keys and values. Grouped heads share a tile; any page size.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mini_infer_engine.kernels.attention.attention_config import MANY_LANES
from mini_infer_engine.kernels.attention.decode_plan import FIELDS, MOST_PARTS, NO_WINDOW, DecodePlan
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.sizes import next_power_of_2
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

_MOST_TURNS: tl.constexpr = tl.constexpr(5)
"""In which parts are added up, each after the one before. More of them are added up in a way that begins later."""
_MERGED_VALUES = 4096
"""Of several parts in a turn; twice as many take registers that the reading loop needs."""
_VALUES_OF_MANY = 64
"""Of parts' sums that a thread asks for at a time, where there are many: it keeps twice as many while it adds up."""


@triton.jit
def _rotated(
    heads,
    inside,
    norm,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads at pointers [heads, 1], normed and rotated: [heads, DIM_BLOCK] fp32.

    Each element is read beside the other of its pair, so that both halves stay in one tile.
    """
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, DIM_BLOCK)[None, :]
    other_dims = tl.where(dims < half, dims + half, dims - half)
    values = tl.load(heads + dims, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(heads + other_dims, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)[:, None]
        values *= scale * tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        others *= scale * tl.load(norm + other_dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    return values * cos + tl.where(dims < half, -others, others) * sin


@triton.jit
def _page_ids(table, start, last, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tokens of a block lie: one page, or one for each token. Tokens after `last` share its page."""
    tokens = start if PAGE_SIZE % BLOCK == 0 else start + tl.arange(0, BLOCK)
    return tl.load(table + tl.minimum(tokens, last) // PAGE_SIZE).to(tl.int64)


@triton.jit
def _merged(first, parts, stride, GROUP: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr,
            PARTS: tl.constexpr):  # fmt: skip
    """What a row's parts come to, as _decode_attention leaves them, `stride` apart: [ROWS, DIM_BLOCK] fp32.

    PARTS at a time, each turn after the one before.
    """
    rows = tl.arange(0, ROWS)[None, :]
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        some = start + tl.arange(0, PARTS)[:, None]
        inside = (some < parts) & (rows < GROUP)
        part_at = first + some * stride + rows
        tops_at = part_at + GROUP * DIM_BLOCK
        sums_at = (part_at + rows * (DIM_BLOCK - 1))[:, :, None] + tl.arange(0, DIM_BLOCK)[None, None, :]
        tops = tl.load(tops_at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        masses = tl.load(tops_at + GROUP, mask=inside, other=0.0, cache_modifier=".cg")
        sums = tl.load(sums_at, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        factors, decay = tl.exp2(tops - new_top[None, :]), tl.exp2(top - new_top)
        mass = mass * decay + tl.sum(masses * factors, axis=0)
        total = total * decay[:, None] + tl.sum(sums * factors[:, :, None], axis=0)
        top = new_top
    return total / mass[:, None]


@triton.jit
def _some(sums_at, tops_at, start, parts, stride, in_group, COUNT: tl.constexpr):
    """Weighted sums [COUNT, ROWS, DIM_BLOCK] and maxima [COUNT, ROWS] of parts from `start` on."""
    some = start + tl.arange(0, COUNT)[:, None]
    inside = (some < parts) & in_group
    sums = tl.load(sums_at + (some * stride)[:, :, None], mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
    return sums, tl.load(tops_at + some * stride, mask=inside, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _merged_many(first, parts, stride, GROUP: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 PARTS: tl.constexpr):  # fmt: skip
    """As _merged, knowing all maxima before it adds anything up. PARTS at a time are asked for before those before them
    are used; a thread adds what it reads to what it has, and threads put theirs together when all is read.
    """
    rows = tl.arange(0, ROWS)[None, :]
    in_group = rows < GROUP
    tops_at = first + GROUP * DIM_BLOCK + rows
    # Not rows * DIM_BLOCK: Triton would see that they are aligned, read 16 bytes at a time, and with that lay a head's
    # parts out over several warps, so that each sum crosses shared memory.
    sums_at = (first + rows + rows * (DIM_BLOCK - 1))[:, :, None] + tl.arange(0, DIM_BLOCK)[None, None, :]
    sums, tops = _some(sums_at, tops_at, 0, parts, stride, in_group, PARTS)
    every = tl.arange(0, MOST_PARTS)[:, None]
    there = (every < parts) & in_group
    all_tops = tl.load(tops_at + every * stride, mask=there, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(tops_at + every * stride + GROUP, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.where(in_group, tl.max(all_tops, axis=0)[None, :], 0.0)
    mass = tl.where(in_group, tl.sum(masses * tl.exp2(all_tops - top), axis=0)[None, :], 1.0)
    total = tl.zeros((PARTS, ROWS, DIM_BLOCK), dtype=tl.float32)
    for start in range(PARTS, parts + PARTS, PARTS):
        total += sums * tl.exp2(tops - top)[:, :, None]
        sums, tops = _some(sums_at, tops_at, start, parts, stride, in_group, PARTS)
    return tl.sum(total, axis=0) / tl.trans(mass)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_tables"])
def _decode_attention(
    qkv,
    cos_sin,
    q_norm,
    k_norm,
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
    window,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    MANY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (KV head, entry of the plan). The part of a row that arrives last merges the others' sums."""
    if PDL:  # see pdl_gemm: the product that comes next may fetch its weights now
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    entry = plan + program * FIELDS
    row = tl.load(entry).to(tl.int64)
    if row < 0:
        return
    table = page_tables + tl.load(entry + 1).to(tl.int64) * table_stride
    position = tl.load(entry + 2)
    begin = tl.load(entry + 3)
    end = tl.load(entry + 4)
    part = tl.load(entry + 5)
    parts = tl.load(entry + 6)
    pages = _page_ids(table, begin, position, PAGE_SIZE, BLOCK)

    half: tl.constexpr = HEAD_DIM // 2
    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims[None, :] < HEAD_DIM
    angle = cos_sin + position.to(tl.int64) * HEAD_DIM + tl.where(dims < half, dims, dims - half)[None, :]
    cos = tl.load(angle, mask=dim_inside, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=dim_inside, other=0.0).to(tl.float32)
    q_heads = qkv + row * qkv_stride + (kv_head * GROUP + heads)[:, None] * HEAD_DIM
    q_inside = (heads < GROUP)[:, None] & dim_inside
    queries = _rotated(q_heads, q_inside, q_norm, cos, sin, eps, HEAD_DIM, DIM_BLOCK, NORM).to(qkv.dtype.element_ty)

    # The last part has the new token. It attends to it from registers, so nobody waits for the write.
    is_last_part = part == parts - 1
    new_inside = dim_inside & is_last_part
    k_head = qkv + row * qkv_stride + (KV_HEADS * GROUP + kv_head + tl.arange(0, 1))[:, None] * HEAD_DIM
    new_key = _rotated(k_head, new_inside, k_norm, cos, sin, eps, HEAD_DIM, DIM_BLOCK, NORM).to(qkv.dtype.element_ty)
    new_value = tl.load(k_head + KV_HEADS * HEAD_DIM + dims[None, :], mask=new_inside, other=0.0)
    new_page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
    head_pool = pool + kv_head * HEAD_DIM
    new_place = head_pool + new_page * page_stride + (position % PAGE_SIZE) * token_stride + dims[None, :]
    tl.store(new_place, new_key, mask=new_inside)
    tl.store(new_place + kv_stride, new_value, mask=new_inside)

    log2e: tl.constexpr = 1.4426950408889634
    new_score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32), axis=1) * (scale * log2e)
    top = tl.where(is_last_part, new_score, float("-inf"))
    mass = tl.zeros((GROUP_BLOCK,), dtype=tl.float32) + tl.where(is_last_part, 1.0, 0.0)
    total = tl.zeros((GROUP_BLOCK, DIM_BLOCK), dtype=tl.float32) + new_value.to(tl.float32)
    places = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        tokens = start + places
        if PAGE_SIZE % BLOCK == 0:
            at = pages * page_stride + (start % PAGE_SIZE + places) * token_stride
        else:
            at = pages * page_stride + (tokens % PAGE_SIZE) * token_stride
        pages = _page_ids(table, start + BLOCK, position, PAGE_SIZE, BLOCK)  # of the next: keys do not wait for it
        seen = (tokens < end) & (tokens > position - window)
        kv_mask = seen[:, None] & dim_inside
        keys = tl.load(head_pool + at[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * log2e)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        values = tl.load(head_pool + kv_stride + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        values = values.to(queries.dtype)
        mass = mass * decay + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(values.dtype), values, total * decay[:, None], input_precision=PRECISION)
        top = new_top

    mixed = out + row * out_stride + kv_head * GROUP * HEAD_DIM
    if not MERGE or parts == 1:
        result = (total / mass[:, None]).to(out.dtype.element_ty)
        tl.store(mixed + heads[:, None] * HEAD_DIM + dims[None, :], result, mask=q_inside)
    else:
        # A partial result is [GROUP, DIM_BLOCK] weighted sums, then their maxima and masses.
        size: tl.constexpr = GROUP * (DIM_BLOCK + 2)
        stride: tl.constexpr = KV_HEADS * size
        lane = row * KV_HEADS + kv_head
        first = partials + (program - part).to(tl.int64) * stride + kv_head * size
        mine = first + part.to(tl.int64) * stride
        tl.store(mine + heads[:, None] * DIM_BLOCK + dims[None, :], total, mask=(heads < GROUP)[:, None])
        tl.store(mine + GROUP * DIM_BLOCK + heads, top, mask=heads < GROUP)
        tl.store(mine + GROUP * (DIM_BLOCK + 1) + heads, mass, mask=heads < GROUP)
        tl.debug_barrier()
        if tl.atomic_add(counters + lane, 1, sem="acq_rel") == parts - 1:
            rows = tl.arange(0, MERGE_ROWS)
            place = mixed + rows[:, None] * HEAD_DIM + dims[None, :]
            inside = (rows < GROUP)[:, None] & dim_inside
            if MANY_PARTS == 0 or parts <= _MOST_TURNS * MERGE_PARTS:
                result = _merged(first, parts, stride, GROUP, DIM_BLOCK, MERGE_ROWS, MERGE_PARTS)
                tl.store(place, result.to(out.dtype.element_ty), mask=inside)
            else:
                result_of_many = _merged_many(first, parts, stride, GROUP, DIM_BLOCK, MERGE_ROWS, MANY_PARTS)
                tl.store(place, result_of_many.to(out.dtype.element_ty), mask=inside)
            tl.store(counters + lane, 0)


def decode_attention(
    qkv: torch.Tensor,
    rotation: Rotation,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    workspace: Workspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the new token of each sequence into its page, and attend from it over all tokens up to it.

    qkv [rows, (q_heads + 2 kv_heads) * head_dim] before norm and rotation (rows may be strided; not changed); pool: one
    layer's view [pages, 2, page_size, kv_heads, head_dim], of qkv's dtype or fp8; page_tables [slots, width] int32,
    read at the plan's slots. The plan is of the same rows. Returns [rows, q_heads * head_dim], in `out` where given.
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
    partial_floats = programs * kv_heads * group * (dim_block + 2) if plan.splits else 0
    are_few = rows * kv_heads < MANY_LANES
    # To add many parts up takes registers, so that no third program fits a multiprocessor. That helps narrow groups as
    # well, which never have so many: launched ahead, three would crowd each multiprocessor that the product before has
    # left, and one stay on the others (8 x 4,096 tokens of 0.6B: 9 % of a step).
    many_parts = _VALUES_OF_MANY * 32 * plan.config.warps // (merge_rows * dim_block)
    assert not plan.splits or rows * kv_heads <= COUNTERS
    _decode_attention[(kv_heads, programs)](
        qkv,
        rotation.cos_sin,
        rotation.q_norm,
        rotation.k_norm,
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
        out.stride(0),
        rotation.eps,
        scale,
        plan.sliding_window or NO_WINDOW,
        GROUP=group,
        GROUP_BLOCK=max(16, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        BLOCK=plan.config.block_tokens,
        NORM=rotation.q_norm is not None,
        MERGE=plan.splits,
        MERGE_ROWS=merge_rows,
        MERGE_PARTS=max(2, _MERGED_VALUES // (merge_rows * dim_block)),
        MANY_PARTS=max(1, min(many_parts, MOST_PARTS.value)) if are_few else 0,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        PDL=plan.config.pdl,
        launch_pdl=plan.config.pdl,
        num_warps=plan.config.warps,
        num_stages=plan.config.stages if dim_block * qkv.itemsize <= 512 else 2,  # of wide heads no more would fit
    )
    return out
