"""Absorbed latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2) of single tokens over paged latents.

The projection that makes a head's keys from latents is applied to its query instead, and the one that makes values to
attention's output. All heads then attend to the same latents, as in multi-query attention, by FlashDecoding's split-KV
(Dao et al. 2023). Three kernels: queries to latents, with the write of the new latent; attention of each split; and the
merge of the splits with the projection to values, each head by itself.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mini_infer_engine.kernels.attention.decode_plan import FIELDS, DecodePlan
from mini_infer_engine.kernels.attention.latent_rope import LatentShape, normed_latents, rotated_halves
from mini_infer_engine.kernels.sizes import LOG2_E, cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace

_FEW_ROWS = 4
"""Rows up to which a program of the last kernel has one row, and does not use tensor cores."""


@triton.jit(do_not_specialize=["rows", "table_stride"],
            do_not_specialize_on_alignment=["page_tables", "slots", "positions", "kv_lengths"])  # fmt: skip
def _absorb(
    packed,
    key_up,
    cos_sin,
    norm,
    pool,
    page_tables,
    slots,
    positions,
    kv_lengths,
    queries,
    rows,
    packed_stride,
    key_up_stride,
    page_stride,
    token_stride,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    KV_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Projects queries to latents: one program per (head, block of the latent's columns, block of rows).

    With WRITES there is one head more, which writes the latents.
    """
    head = tl.program_id(0)
    column = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    nope = tl.arange(0, NOPE_BLOCK)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    half: tl.constexpr = ROPE_DIM // 2
    width: tl.constexpr = KV_RANK + ROPE_DIM
    dims = tl.arange(0, HALF_BLOCK)
    weight_mask = (nope < NOPE_DIM)[:, None] & (columns < KV_RANK)[None, :] & (head < HEADS)
    weight_at = key_up + head.to(tl.int64) * key_up_stride + nope[:, None] * KV_RANK + columns[None, :]
    weight = tl.load(weight_at, mask=weight_mask, other=0.0)
    if PDL:  # weights are read before the wait: see pdl_gemm
        gdc_launch_dependents()
        gdc_wait()
    kv_length = tl.load(kv_lengths + row, mask=row < rows, other=-1).to(tl.int32)
    valid = kv_length >= 0
    position = tl.load(positions + row, mask=valid, other=0).to(tl.int32)
    row_at = packed + row.to(tl.int64)[:, None] * packed_stride
    if head < HEADS:
        query_at = row_at + head * (NOPE_DIM + ROPE_DIM)
        query = tl.load(query_at + nope[None, :], mask=valid[:, None] & (nope < NOPE_DIM)[None, :], other=0.0)
        absorbed = tl.dot(query, weight, input_precision=PRECISION)
        target = queries + (row.to(tl.int64)[:, None] * HEADS + head) * width
        inside = valid[:, None] & (columns < KV_RANK)[None, :]
        tl.store(target + columns[None, :], absorbed.to(queries.dtype.element_ty), mask=inside)
        if column == 0:
            first, second = rotated_halves(
                query_at + NOPE_DIM, valid, cos_sin, position, ROPE_DIM, HALF_BLOCK, INTERLEAVED
            )
            mask = valid[:, None] & (dims < half)[None, :]
            tl.store(target + KV_RANK + dims[None, :], first.to(queries.dtype.element_ty), mask=mask)
            tl.store(target + KV_RANK + half + dims[None, :], second.to(queries.dtype.element_ty), mask=mask)
    elif WRITES and column == 0:
        slot = tl.load(slots + row, mask=valid, other=0).to(tl.int64)
        page = tl.load(page_tables + slot * table_stride + kv_length // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        cached = (pool + page * page_stride + (kv_length % PAGE_SIZE) * token_stride)[:, None]
        latent_at = row_at + HEADS * (NOPE_DIM + ROPE_DIM)
        latent = normed_latents(latent_at, norm, valid, eps, KV_RANK, RANK_BLOCK)
        rank = tl.arange(0, RANK_BLOCK)[None, :]
        tl.store(cached + rank, latent.to(packed.dtype.element_ty), mask=valid[:, None] & (rank < KV_RANK))
        first, second = rotated_halves(latent_at + KV_RANK, valid, cos_sin, position, ROPE_DIM, HALF_BLOCK, INTERLEAVED)
        mask = valid[:, None] & (dims < half)[None, :]
        tl.store(cached + KV_RANK + dims[None, :], first.to(packed.dtype.element_ty), mask=mask)
        tl.store(cached + KV_RANK + half + dims[None, :], second.to(packed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_tables", "maxima", "sums"])
def _attend(
    queries,
    pool,
    page_tables,
    plan,
    accs,
    maxima,
    sums,
    splits_of,
    page_stride,
    token_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    KV_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split-KV: one program per (block of heads, entry of the plan). `scale` is in base two."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(1)
    entry = plan + program * FIELDS
    row = tl.load(entry).to(tl.int64)
    if row < 0:
        return
    table = page_tables + tl.load(entry + 1).to(tl.int64) * table_stride
    kv_length = tl.load(entry + 2)
    begin = tl.load(entry + 3)
    end = tl.load(entry + 4)
    split = tl.load(entry + 5)
    splits = tl.load(entry + 6)
    is_first = (split == 0) & (tl.program_id(0) == 0)
    tl.store(splits_of + row * 2, program, mask=is_first)
    tl.store(splits_of + row * 2 + 1, splits, mask=is_first)
    end = tl.where(split == splits - 1, kv_length + 1, end)  # the new token's latent is in its page already

    width: tl.constexpr = KV_RANK + ROPE_DIM
    heads = tl.program_id(0) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    rank = tl.arange(0, RANK_BLOCK)
    rope = tl.arange(0, ROPE_BLOCK)
    in_heads = (heads < HEADS)[:, None]
    query_at = queries + (row * HEADS + heads)[:, None] * width
    query = tl.load(query_at + rank[None, :], mask=in_heads & (rank < KV_RANK)[None, :], other=0.0)
    rotated = tl.load(query_at + KV_RANK + rope[None, :], mask=in_heads & (rope < ROPE_DIM)[None, :], other=0.0)
    m_i = tl.full((HEADS_BLOCK,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((HEADS_BLOCK,), dtype=tl.float32)
    acc = tl.zeros((HEADS_BLOCK, RANK_BLOCK), dtype=tl.float32)
    offsets = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        tokens = start + offsets
        seen = tokens < end
        page = tl.load(table + tokens // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        at = (pool + page * page_stride + (tokens % PAGE_SIZE) * token_stride)[:, None]
        latent = tl.load(at + rank[None, :], mask=seen[:, None] & (rank < KV_RANK)[None, :], other=0.0)
        key = tl.load(at + KV_RANK + rope[None, :], mask=seen[:, None] & (rope < ROPE_DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(rotated, tl.trans(key), scores, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    of_program = program.to(tl.int64) * HEADS + heads
    tl.store(accs + of_program[:, None] * KV_RANK + rank[None, :], acc, mask=in_heads & (rank < KV_RANK)[None, :])
    tl.store(maxima + of_program, m_i, mask=heads < HEADS)
    tl.store(sums + of_program, l_i, mask=heads < HEADS)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["kv_lengths", "maxima", "sums"])
def _to_values(
    accs,
    maxima,
    sums,
    splits_of,
    kv_lengths,
    value_up,
    out,
    rows,
    value_up_stride,
    out_stride,
    HEADS: tl.constexpr,
    KV_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges and projects: one program per (head, block of a value's columns, block of rows). Skips padded rows."""
    head = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANK_BLOCK)
    in_rank = (rank < KV_RANK)[None, :]
    weight_at = value_up + head.to(tl.int64) * value_up_stride + columns[:, None] * KV_RANK + rank[None, :]
    weight = tl.load(weight_at, mask=(columns < VALUE_DIM)[:, None] & in_rank, other=0.0)  # [COLUMNS, RANK_BLOCK]
    if PDL:  # weights are read before the wait: see pdl_gemm
        gdc_launch_dependents()
        gdc_wait()
    if ROWS == 1:
        row = tl.program_id(2).to(tl.int64)
        if tl.load(kv_lengths + row) < 0:
            return
        first = tl.load(splits_of + row * 2)
        count = tl.load(splits_of + row * 2 + 1)
        m_one = tl.max(tl.full((SPLITS,), float("-inf"), dtype=tl.float32), axis=0)
        l_one = tl.sum(tl.zeros((SPLITS,), dtype=tl.float32), axis=0)
        acc_one = tl.zeros((RANK_BLOCK,), dtype=tl.float32)
        for start in range(0, count, SPLITS):
            split = start + tl.arange(0, SPLITS)
            there = split < count
            at = (first + split).to(tl.int64) * HEADS + head
            m_splits = tl.load(maxima + at, mask=there, other=float("-inf"))
            l_splits = tl.load(sums + at, mask=there, other=0.0)
            acc_splits = tl.load(accs + at[:, None] * KV_RANK + rank[None, :], mask=there[:, None] & in_rank, other=0.0)
            m_new = tl.maximum(m_one, tl.max(m_splits, axis=0))
            weights = tl.exp2(m_splits - m_new)
            alpha = tl.exp2(m_one - m_new)
            l_one = l_one * alpha + tl.sum(l_splits * weights, axis=0)
            acc_one = acc_one * alpha + tl.sum(acc_splits * weights[:, None], axis=0)
            m_one = m_new
        mixed = (acc_one / l_one).to(out.dtype.element_ty).to(tl.float32)
        value = tl.sum(weight.to(tl.float32) * mixed[None, :], axis=1)
        target = out + row * out_stride + head * VALUE_DIM + columns
        tl.store(target, value.to(out.dtype.element_ty), mask=columns < VALUE_DIM)
    else:
        some = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        valid = some < rows
        valid = valid & (tl.load(kv_lengths + some, mask=valid, other=-1) >= 0)
        firsts = tl.load(splits_of + some * 2, mask=valid, other=0)
        counts = tl.load(splits_of + some * 2 + 1, mask=valid, other=0)
        m_i = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        l_i = tl.zeros((ROWS,), dtype=tl.float32)
        acc = tl.zeros((ROWS, RANK_BLOCK), dtype=tl.float32)
        for each in range(tl.max(counts, axis=0)):
            has = each < counts
            of_row = (firsts + each).to(tl.int64) * HEADS + head
            m_split = tl.load(maxima + of_row, mask=has, other=float("-inf"))
            l_split = tl.load(sums + of_row, mask=has, other=0.0)
            acc_at = accs + of_row[:, None] * KV_RANK + rank[None, :]
            acc_split = tl.load(acc_at, mask=has[:, None] & in_rank, other=0.0)
            m_next = tl.maximum(m_i, m_split)
            shift = tl.where(m_next == float("-inf"), 0.0, m_next)  # of padded rows, which have no split
            part = tl.exp2(m_split - shift)
            kept = tl.exp2(m_i - shift)
            l_i = l_i * kept + l_split * part
            acc = acc * kept[:, None] + acc_split * part[:, None]
            m_i = m_next
        mixed_rows = (acc / tl.where(valid, l_i, 1.0)[:, None]).to(weight.dtype)
        values = tl.dot(mixed_rows, tl.trans(weight), input_precision=PRECISION)
        target_rows = out + some.to(tl.int64)[:, None] * out_stride + head * VALUE_DIM + columns[None, :]
        inside = valid[:, None] & (columns < VALUE_DIM)[None, :]
        tl.store(target_rows, values.to(out.dtype.element_ty), mask=inside)


def latent_decode(
    packed: torch.Tensor,
    shape: LatentShape,
    cos_sin: torch.Tensor,
    norm: torch.Tensor,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_lengths: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    workspace: Workspace,
    writes: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends from each row's token over all latents up to it, its own included: [rows, heads * value_dim].

    packed [rows, q_width + latent_width] before norm and rotation (rows may be strided; not changed). With `writes`
    each row's latent is written to its page first; rows of one sequence then see the latents of earlier rows in the
    same call. key_up [heads, nope_dim, kv_rank] and value_up [heads, value_dim, kv_rank], contiguous but for the heads;
    pool: one layer's view [pages, 1, page_size, 1, latent_width]; page_tables [slots, width] int32 are read at `slots`
    [rows]; tokens are at `positions` [rows] of the text, after `kv_lengths` [rows] tokens in the cache; rows whose
    length is below zero are padding and leave `out` as it is. The plan is of the same rows, for one KV head.
    """
    rows = packed.shape[0]
    heads, rank, page_size = shape.heads, shape.kv_rank, pool.shape[2]
    if out is None:
        out = torch.empty((rows, heads * shape.value_dim), dtype=packed.dtype, device=packed.device)
    if not rows:
        return out
    config, device = plan.config, packed.device
    precision = "ieee" if packed.dtype == torch.float32 else "tf32"
    rank_block = next_power_of_2(rank)
    queries = torch.empty((rows, heads, shape.latent_width), dtype=packed.dtype, device=device)
    tile_rows, columns = 16 if rows <= 64 else 64, min(128, rank_block)
    common = {"HEADS": heads, "KV_RANK": rank, "RANK_BLOCK": rank_block, "PRECISION": precision, "PDL": config.pdl}
    _absorb[(heads + int(writes), cdiv(rank, columns), cdiv(rows, tile_rows))](
        packed,
        key_up,
        cos_sin,
        norm,
        pool,
        page_tables,
        slots,
        positions,
        kv_lengths,
        queries,
        rows,
        packed.stride(0),
        key_up.stride(0),
        pool.stride(0),
        pool.stride(2),
        page_tables.stride(0),
        shape.eps,
        NOPE_DIM=shape.nope_dim,
        NOPE_BLOCK=max(16, next_power_of_2(shape.nope_dim)),
        ROPE_DIM=shape.rope_dim,
        HALF_BLOCK=next_power_of_2(shape.rope_dim // 2),
        PAGE_SIZE=page_size,
        INTERLEAVED=shape.interleaved,
        WRITES=writes,
        ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=4 if tile_rows == 16 else 8,
        launch_pdl=config.pdl,
        **common,
    )
    programs = plan.entries.shape[0]
    floats = workspace.partials(programs * heads * (rank + 2))
    accs, maxima, sums = floats, floats[programs * heads * rank :], floats[programs * heads * (rank + 1) :]
    splits_of = torch.empty((rows, 2), dtype=torch.int32, device=device)
    heads_block = 16 if heads <= 16 else 32
    _attend[(cdiv(heads, heads_block), programs)](
        queries,
        pool,
        page_tables,
        plan.entries,
        accs,
        maxima,
        sums,
        splits_of,
        pool.stride(0),
        pool.stride(2),
        page_tables.stride(0),
        scale * LOG2_E,
        HEADS_BLOCK=heads_block,
        ROPE_DIM=shape.rope_dim,
        ROPE_BLOCK=max(16, next_power_of_2(shape.rope_dim)),
        PAGE_SIZE=page_size,
        BLOCK=config.block_tokens,
        num_warps=config.warps if heads_block == 16 else 8,
        num_stages=config.stages,
        launch_pdl=config.pdl,
        **common,
    )
    are_few = rows <= _FEW_ROWS
    value_columns = min(32 if are_few else 64, max(16, next_power_of_2(shape.value_dim)))
    _to_values[(heads, cdiv(shape.value_dim, value_columns), rows if are_few else cdiv(rows, 16))](
        accs,
        maxima,
        sums,
        splits_of,
        kv_lengths,
        value_up,
        out,
        rows,
        value_up.stride(0),
        out.stride(0),
        VALUE_DIM=shape.value_dim,
        ROWS=1 if are_few else 16,
        SPLITS=16,
        COLUMNS=value_columns,
        num_warps=4 if are_few else 8,
        launch_pdl=config.pdl,
        **common,
    )
    return out
