"""Causal attention of prompt chunks over their paged KV cache: FlashAttention-2 (Dao, arXiv:2307.08691) in Triton.

For any page size and dtype; flash-attn, where it is installed, is faster for long prompts.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _prefill_attention(
    q,
    pool,
    page_tables,
    query_starts,
    ends,
    out,
    q_stride,
    page_stride,
    kv_stride,
    token_stride,
    table_stride,
    out_stride,
    scale,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of queries, query head, sequence)."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(query_starts + sequence).to(tl.int32)
    count = tl.load(query_starts + sequence + 1).to(tl.int32) - begin
    if block * QUERIES >= count:
        return
    end = tl.load(ends + sequence).to(tl.int32)
    queries = block * QUERIES + tl.arange(0, QUERIES)
    positions = end - count + queries
    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims < HEAD_DIM
    rows = (begin + queries).to(tl.int64)
    inside = (queries < count)[:, None] & dim_inside[None, :]
    query = tl.load(q + rows[:, None] * q_stride + head * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    table = page_tables + sequence.to(tl.int64) * table_stride
    head_pool = pool + (head // GROUP) * HEAD_DIM

    log2e: tl.constexpr = 1.4426950408889634
    top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((QUERIES,), dtype=tl.float32)
    total = tl.zeros((QUERIES, DIM_BLOCK), dtype=tl.float32)
    first = tl.maximum(end - count + block * QUERIES - window + 1, 0) // BLOCK * BLOCK
    last = tl.minimum(end - count + (block + 1) * QUERIES, end)
    for start in range(first, last, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        exists = tokens < end
        page = tl.load(table + tokens // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        at = page * page_stride + (tokens % PAGE_SIZE) * token_stride
        kv_mask = exists[:, None] & dim_inside[None, :]
        keys = tl.load(head_pool + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * (scale * log2e)
        seen = (tokens[None, :] <= positions[:, None]) & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        values = tl.load(head_pool + kv_stride + at[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        mass = mass * decay + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(values.dtype), values, total * decay[:, None], input_precision=PRECISION)
        top = new_top
    result = (total / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * out_stride + head * HEAD_DIM + dims[None, :], result, mask=inside)


def prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    query_starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    longest_query: int,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend from each sequence's new tokens over all its tokens; their keys and values are in the pool already.

    q [tokens, q_heads, head_dim], rows may be strided; query_starts [sequences + 1] where each one's rows begin;
    ends [sequences]: tokens of each with its new ones; page_tables [sequences, width].
    Returns [tokens, q_heads * head_dim].
    """
    tokens, q_heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = pool.shape
    sequences = ends.shape[0]
    out = torch.empty((tokens, q_heads * head_dim), dtype=q.dtype, device=q.device)
    wide = q.dtype == torch.float32
    queries, block = (32, 32) if wide else (128 if longest_query > 64 else 64, 64)
    if tokens:
        _prefill_attention[(triton.cdiv(longest_query, queries), q_heads, sequences)](
            q,
            pool,
            page_tables,
            query_starts,
            ends,
            out,
            q.stride(0),
            pool.stride(0),
            pool.stride(1),
            pool.stride(2),
            page_tables.stride(0),
            out.stride(0),
            scale,
            sliding_window or (1 << 30),
            GROUP=q_heads // kv_heads,
            HEAD_DIM=head_dim,
            DIM_BLOCK=triton.next_power_of_2(head_dim),
            PAGE_SIZE=page_size,
            QUERIES=queries,
            BLOCK=block,
            PRECISION="ieee" if wide else "tf32",
            num_warps=4 if wide or queries == 64 else 8,
            num_stages=2 if wide else 3,
        )
    return out
