# ruff: noqa
"""Attention of one new token a sequence over its paged KV cache: split-K flash decoding (Dao et al. 2023,
"Flash-Decoding for long-context inference"), grouped query heads packed into one tile, any page size.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.workspace import Workspace

BLOCK_TOKENS = 64
WARPS = 4
STAGES = 3
TARGET_PROGRAMS = 528
"""Four programs for each of an H200's 132 multiprocessors keep enough loads in flight."""


@triton.jit(
    do_not_specialize=["splits", "table_stride"], do_not_specialize_on_alignment=["page_tables", "slots", "positions"]
)
def _decode_attention(
    q,
    pool,
    page_tables,
    slots,
    positions,
    out,
    partials,
    counters,
    q_stride,
    page_stride,
    kv_stride,
    token_stride,
    table_stride,
    out_stride,
    scale,
    window,
    splits,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (sequence, kv head, split). The split that arrives last merges the others' sums."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    first_token = tl.maximum(length - window, 0) // BLOCK * BLOCK
    tokens_of_split = tl.cdiv(tl.cdiv(length - first_token, BLOCK), splits) * BLOCK
    active = tl.cdiv(length - first_token, tokens_of_split)
    if split >= active:
        return

    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    head_inside = heads < GROUP
    dim_inside = dims < HEAD_DIM
    q_at = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    inside = head_inside[:, None] & dim_inside[None, :]
    queries = tl.load(q + row.to(tl.int64) * q_stride + q_at, mask=inside, other=0.0)
    table = page_tables + tl.load(slots + row).to(tl.int64) * table_stride
    head_pool = pool + kv_head * HEAD_DIM

    log2e: tl.constexpr = 1.4426950408889634
    top = tl.full((GROUP_BLOCK,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
    total = tl.zeros((GROUP_BLOCK, DIM_BLOCK), dtype=tl.float32)
    begin = first_token + split * tokens_of_split
    for start in range(begin, tl.minimum(begin + tokens_of_split, length), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        seen = (tokens < length) & (tokens >= length - window)
        if PAGE_SIZE % BLOCK == 0:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            at = page * page_stride + (tokens % PAGE_SIZE) * token_stride
        else:
            page = tl.load(table + tokens // PAGE_SIZE, mask=tokens < length, other=0).to(tl.int64)
            at = page * page_stride + (tokens % PAGE_SIZE) * token_stride
        kv_mask = seen[:, None] & dim_inside[None, :]
        keys = tl.load(head_pool + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * log2e)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        values = tl.load(head_pool + kv_stride + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        mass = mass * decay + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(values.dtype), values, total * decay[:, None], input_precision=PRECISION)
        top = new_top

    last = True
    if MERGE:
        # A partial result is [GROUP_BLOCK, DIM_BLOCK + 2]: the weighted sum, then its running maximum and mass.
        lane = row * KV_HEADS + kv_head
        size: tl.constexpr = GROUP_BLOCK * (DIM_BLOCK + 2)
        mine = partials + (lane.to(tl.int64) * splits + split) * size
        tl.store(mine + heads[:, None] * DIM_BLOCK + dims[None, :], total)
        tl.store(mine + GROUP_BLOCK * DIM_BLOCK + heads, top)
        tl.store(mine + GROUP_BLOCK * (DIM_BLOCK + 1) + heads, mass)
        tl.debug_barrier()
        last = tl.atomic_add(counters + lane, 1, sem="acq_rel") == active - 1
        if last:
            top = tl.full((GROUP_BLOCK,), float("-inf"), dtype=tl.float32)
            mass = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
            total = tl.zeros((GROUP_BLOCK, DIM_BLOCK), dtype=tl.float32)
            for other in range(active):
                theirs = partials + (lane.to(tl.int64) * splits + other) * size
                their_top = tl.load(theirs + GROUP_BLOCK * DIM_BLOCK + heads, cache_modifier=".cg")
                their_mass = tl.load(theirs + GROUP_BLOCK * (DIM_BLOCK + 1) + heads, cache_modifier=".cg")
                part = tl.load(theirs + heads[:, None] * DIM_BLOCK + dims[None, :], cache_modifier=".cg")
                new_top = tl.maximum(top, their_top)
                total = total * tl.exp2(top - new_top)[:, None] + part * tl.exp2(their_top - new_top)[:, None]
                mass = mass * tl.exp2(top - new_top) + their_mass * tl.exp2(their_top - new_top)
                top = new_top
            tl.store(counters + lane, 0)
    if last:
        result = (total / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * out_stride + q_at, result, mask=inside)


def splits_for(rows: int, kv_heads: int, max_tokens: int) -> int:
    """How many programs share one sequence's cache: enough to fill the GPU, none without a block of tokens."""
    wanted = TARGET_PROGRAMS // max(1, rows * kv_heads)
    return max(1, min(wanted, triton.cdiv(max_tokens, BLOCK_TOKENS), 128))


def decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    splits: int,
    sliding_window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the token at `positions` [rows] of each sequence over all tokens up to it, itself included.

    q [rows, q_heads, head_dim] (rows may be strided); pool: one layer's view [pages, 2, page_size, kv_heads, head_dim];
    page_tables [slots, width] int32, read at row `slots` [rows]. Returns [rows, q_heads * head_dim], in
    `out` where that is given.
    """
    rows, q_heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = pool.shape
    group = q_heads // kv_heads
    if out is None:
        out = torch.empty((rows, q_heads * head_dim), dtype=q.dtype, device=q.device)
    group_block = max(16, triton.next_power_of_2(group))
    dim_block = triton.next_power_of_2(head_dim)
    workspace = Workspace.of(q.device, partials=rows * kv_heads * splits * group_block * (dim_block + 2))
    if rows:
        _decode_attention[(rows, kv_heads, splits)](
            q,
            pool,
            page_tables,
            slots,
            positions,
            out,
            workspace.partials,
            workspace.counters,
            q.stride(0),
            pool.stride(0),
            pool.stride(1),
            pool.stride(2),
            page_tables.stride(0),
            out.stride(0),
            scale,
            sliding_window or (1 << 30),
            splits,
            GROUP=group,
            GROUP_BLOCK=group_block,
            HEAD_DIM=head_dim,
            DIM_BLOCK=dim_block,
            KV_HEADS=kv_heads,
            PAGE_SIZE=page_size,
            BLOCK=BLOCK_TOKENS,
            MERGE=splits > 1,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out
