"""Quest's page selection for decode attention (Tang et al. 2024, arXiv 2406.10774), on lengths that the device knows.

A page's bounds are the smallest and the largest of its keys, element by element. They bound the score of a query with
any key of the page. Each KV head of each row attends to the pages with the highest bounds: their ids, in the order of
the text, are a page table of the head's own, which decode attention reads like that of a shorter sequence. All kernels
run in CUDA graphs, since no size depends on lengths.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mini_infer_engine.kernels.attention.decode_attention import rotated
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_SCORED_ELEMENTS = 32 * 128
"""Elements of the bounds of pages that a program of `score_pages` reads at a time, twice."""
_BOUNDED_TOKENS = 128
"""Tokens among which a program of `bound_pages` looks for those that complete a page."""
_BOUNDED_ELEMENTS = 64 * 128
"""Elements of keys that it reads at a time."""
_FIRST_RANK: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Rank of pages that are always selected; no score has it."""
_NO_RANK: tl.constexpr = tl.constexpr(-0x80000000)
"""Rank of places after the sequence's last page."""


@triton.jit(do_not_specialize=["table_stride", "rows"],
            do_not_specialize_on_alignment=["slots", "kv_lengths", "page_tables"])  # fmt: skip
def _place_rows(slots, kv_lengths, page_tables, lengths, kv_index, table_stride, rows, PAGE_SIZE: tl.constexpr,
                BUDGET: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
    kv_length = tl.load(kv_lengths + row, mask=mask, other=-1).to(tl.int32)
    is_there = kv_length >= 0
    page = tl.maximum(kv_length, 0) // PAGE_SIZE
    offset = tl.maximum(kv_length, 0) % PAGE_SIZE
    selected = tl.minimum(page, BUDGET - 1) * PAGE_SIZE + offset
    tl.store(lengths + row, tl.where(is_there, selected, -1), mask=mask)
    page_id = tl.load(page_tables + slot * table_stride + page, mask=mask & is_there, other=0)
    tl.store(kv_index + row, tl.where(is_there, page_id * PAGE_SIZE + offset, -1), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "score_stride"],
            do_not_specialize_on_alignment=["slots", "positions", "kv_lengths", "page_tables"])  # fmt: skip
def _score_pages(
    qkv,
    cos_sin,
    q_norm,
    bounds,
    slots,
    positions,
    kv_lengths,
    page_tables,
    scores,
    qkv_stride,
    bound_stride,
    table_stride,
    score_stride,
    eps,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BUDGET: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (KV head, block of complete pages, row). Rows within the budget need no scores."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    row = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
    complete = tl.load(kv_lengths + row).to(tl.int32) // PAGE_SIZE
    if complete < BUDGET or start >= complete:
        return
    half: tl.constexpr = HEAD_DIM // 2
    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    dim_inside = dims[None, :] < HEAD_DIM
    place = start + tl.arange(0, BLOCK)
    table = page_tables + tl.load(slots + row).to(tl.int64) * table_stride
    page = tl.load(table + place, mask=place < complete, other=0).to(tl.int64)
    at = bounds + page[:, None] * bound_stride + kv_head * (2 * HEAD_DIM) + dims[None, :]
    inside = (place < complete)[:, None] & dim_inside
    smallest = tl.load(at, mask=inside, other=0.0)
    largest = tl.load(at + HEAD_DIM, mask=inside, other=0.0)
    position = tl.load(positions + row).to(tl.int64)
    angle = cos_sin + position * HEAD_DIM + tl.where(dims < half, dims, dims - half)[None, :]
    cos = tl.load(angle, mask=dim_inside, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=dim_inside, other=0.0).to(tl.float32)
    q_heads = qkv + row * qkv_stride + (kv_head * GROUP + heads)[:, None] * HEAD_DIM
    q_inside = (heads < GROUP)[:, None] & dim_inside
    dtype: tl.constexpr = qkv.dtype.element_ty
    queries = rotated(q_heads, q_inside, q_norm, cos, sin, eps, HEAD_DIM, DIM_BLOCK, NORM).to(dtype).to(tl.float32)
    positive = tl.maximum(queries, 0.0).to(dtype)
    negative = tl.minimum(queries, 0.0).to(dtype)
    products = tl.dot(positive, tl.trans(largest), input_precision=PRECISION)
    products = tl.dot(negative, tl.trans(smallest), products, input_precision=PRECISION)
    products = tl.where((heads < GROUP)[:, None], products, float("-inf"))
    score_at = scores + (row * KV_HEADS + kv_head) * score_stride + place
    tl.store(score_at, tl.max(products, axis=0), mask=place < complete)


@triton.jit(do_not_specialize=["table_stride", "score_stride"],
            do_not_specialize_on_alignment=["slots", "kv_lengths", "page_tables"])  # fmt: skip
def _select_pages(scores, slots, kv_lengths, page_tables, selected, table_stride, score_stride,
                  KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BUDGET: tl.constexpr, WIDTH: tl.constexpr,
                  FIRST: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program per (KV head, row). The rank from which pages are selected is found bit by bit, by counting.

    Scores are ranked as integers in the same order. Of pages at the last rank the first are selected.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kv_length = tl.load(kv_lengths + row).to(tl.int32)
    if kv_length < 0:
        return
    newest = kv_length // PAGE_SIZE
    place = tl.arange(0, WIDTH)
    table = page_tables + tl.load(slots + row).to(tl.int64) * table_stride
    page = tl.load(table + place, mask=place <= newest, other=0)
    head = row * KV_HEADS + kv_head
    out = selected + head * BUDGET
    if newest < BUDGET:
        tl.store(out + place, page, mask=place <= newest)
        return
    is_scored = (place >= FIRST) & (place <= newest - LAST)
    bits = tl.load(scores + head * score_stride + place, mask=is_scored, other=0.0).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.minimum(tl.maximum(rank, _NO_RANK + 1), _FIRST_RANK - 1)
    rank = tl.where(is_scored, rank, tl.where(place <= newest, _FIRST_RANK, _NO_RANK))
    # The largest rank that at least BUDGET places have or exceed, from its sign on.
    lowest = tl.where(tl.sum((rank >= 0).to(tl.int32)) >= BUDGET, 0, _NO_RANK)
    for step in range(31):
        higher = lowest + (1 << (30 - step))
        lowest = tl.where(tl.sum((rank >= higher).to(tl.int32)) >= BUDGET, higher, lowest)
    is_tied = rank == lowest
    num_tied = BUDGET - tl.sum((rank > lowest).to(tl.int32))
    is_chosen = (rank > lowest) | (is_tied & (tl.cumsum(is_tied.to(tl.int32)) <= num_tied))
    tl.store(out + tl.cumsum(is_chosen.to(tl.int32)) - 1, page, mask=is_chosen)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["kv_index"])
def _bound_pages(pool, kv_index, bounds, page_stride, token_stride, bound_stride, tokens, HEAD_DIM: tl.constexpr,
                 DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """One program per (KV head, block of new tokens): bounds the keys of the pages whose last token is among them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    index = tl.load(kv_index + token, mask=token < tokens, other=-1).to(tl.int32)
    completes = (index >= 0) & (index % PAGE_SIZE == PAGE_SIZE - 1)
    rank = tl.cumsum(completes.to(tl.int32))
    dims = tl.arange(0, DIM_BLOCK)
    offsets = tl.arange(0, BLOCK)
    for nth in range(1, tl.sum(completes.to(tl.int32)) + 1):
        page = tl.sum(tl.where(completes & (rank == nth), index // PAGE_SIZE, 0)).to(tl.int64)
        smallest = tl.full((DIM_BLOCK,), float("inf"), dtype=tl.float32)
        largest = tl.full((DIM_BLOCK,), float("-inf"), dtype=tl.float32)
        keys_at = pool + page * page_stride + kv_head * HEAD_DIM + dims[None, :]
        for start in range(0, PAGE_SIZE, BLOCK):
            offset = (start + offsets)[:, None]
            mask = (offset < PAGE_SIZE) & (dims < HEAD_DIM)[None, :]
            keys = tl.load(keys_at + offset * token_stride, mask=mask, other=0.0).to(tl.float32)
            smallest = tl.minimum(smallest, tl.min(tl.where(mask, keys, float("inf")), axis=0))
            largest = tl.maximum(largest, tl.max(tl.where(mask, keys, float("-inf")), axis=0))
        at = bounds + page * bound_stride + kv_head * (2 * HEAD_DIM) + dims
        tl.store(at, smallest.to(bounds.dtype.element_ty), mask=dims < HEAD_DIM)
        tl.store(at + HEAD_DIM, largest.to(bounds.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class SelectionPlan:
    """The rows of one pass, for all layers, and memory that its layers use one after the other."""

    slots: torch.Tensor  # [rows] whose page tables are read
    positions: torch.Tensor  # [rows]
    kv_lengths: torch.Tensor  # [rows] before the new token; -1 in rows of padding
    page_tables: torch.Tensor  # [slots, width] int32
    lengths: torch.Tensor  # [rows] int32, tokens in the selected pages before the new one
    kv_index: torch.Tensor  # [rows] int32, where the new token is written
    scores: torch.Tensor  # [rows, kv_heads, width] fp32
    selected: torch.Tensor  # [rows, kv_heads, budget] int32, ids of the selected pages
    page_size: int
    first_pages: int
    """Pages at the beginning of a row that are always selected."""
    last_pages: int
    """Pages at its end that are always selected, with that of the new token."""
    most_pages: int
    """Pages of the longest sequence, so that no kernel is compiled late."""
    pdl: bool

    @property
    def budget(self) -> int:
        """Pages that a row attends to."""
        return self.selected.shape[2]


def plan_selection(
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_lengths: torch.Tensor,
    page_tables: torch.Tensor,
    *,
    kv_heads: int,
    page_size: int,
    budget: int,
    first_pages: int,
    last_pages: int,
    most_pages: int,
    pdl: bool,
) -> SelectionPlan:
    """Plans the selection of `budget` pages for rows with `kv_lengths` [rows] tokens before the new one. Of these,
    `first_pages` and `last_pages` are always selected.

    page_tables [slots, width] int32 are read at slots [rows]. pdl: kernels begin by programmatic dependent launch.
    """
    rows, width, device = positions.shape[0], page_tables.shape[1], positions.device
    lengths = torch.empty(rows, dtype=torch.int32, device=device)
    kv_index = torch.empty_like(lengths)
    if rows:
        block = 64
        _place_rows[(cdiv(rows, block),)](
            slots, kv_lengths, page_tables, lengths, kv_index, page_tables.stride(0), rows,
            PAGE_SIZE=page_size, BUDGET=budget, BLOCK=block, num_warps=2,
        )  # fmt: skip
    scores = torch.empty((rows, kv_heads, width), dtype=torch.float32, device=device)
    selected = torch.zeros((rows, kv_heads, budget), dtype=torch.int32, device=device)
    return SelectionPlan(
        slots,
        positions,
        kv_lengths,
        page_tables,
        lengths,
        kv_index,
        scores,
        selected,
        page_size,
        first_pages,
        last_pages,
        most_pages,
        pdl,
    )


def select_pages(qkv: torch.Tensor, rotation: Rotation, bounds: torch.Tensor, plan: SelectionPlan) -> torch.Tensor:
    """Selects the pages of one layer. Returns the plan's `selected`, which the next layer overwrites.

    qkv [rows, (q_heads + 2 kv_heads) * head_dim] before norm and rotation; bounds [pages, kv_heads, 2, head_dim] of all
    complete pages. Of the query heads of a KV head the largest bound counts. Rows within the budget get all pages; what
    follows those of the new token is left as it is.
    """
    rows, (_, kv_heads, _, head_dim) = qkv.shape[0], bounds.shape
    if not rows:
        return plan.selected
    group = qkv.shape[1] // head_dim // kv_heads - 2
    dim_block = next_power_of_2(head_dim)
    block = max(16, _SCORED_ELEMENTS // dim_block)
    _score_pages[(kv_heads, cdiv(plan.page_tables.shape[1], block), rows)](
        qkv,
        rotation.cos_sin,
        rotation.q_norm,
        bounds,
        plan.slots,
        plan.positions,
        plan.kv_lengths,
        plan.page_tables,
        plan.scores,
        qkv.stride(0),
        bounds.stride(0),
        plan.page_tables.stride(0),
        plan.scores.stride(1),
        rotation.eps,
        GROUP=group,
        GROUP_BLOCK=max(16, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        KV_HEADS=kv_heads,
        PAGE_SIZE=plan.page_size,
        BUDGET=plan.budget,
        BLOCK=block,
        NORM=rotation.q_norm is not None,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        PDL=plan.pdl,
        launch_pdl=plan.pdl,
        num_warps=4,
    )
    width = next_power_of_2(plan.most_pages)
    _select_pages[(kv_heads, rows)](
        plan.scores,
        plan.slots,
        plan.kv_lengths,
        plan.page_tables,
        plan.selected,
        plan.page_tables.stride(0),
        plan.scores.stride(1),
        KV_HEADS=kv_heads,
        PAGE_SIZE=plan.page_size,
        BUDGET=plan.budget,
        WIDTH=width,
        FIRST=plan.first_pages,
        LAST=plan.last_pages,
        PDL=plan.pdl,
        launch_pdl=plan.pdl,
        num_warps=1 if width <= 1024 else 4 if width <= 8192 else 16,
    )
    return plan.selected


def bound_pages(pool: torch.Tensor, kv_index: torch.Tensor, bounds: torch.Tensor, *, pdl: bool = False) -> None:
    """Makes the bounds [pages, kv_heads, 2, head_dim] of pages whose last token was written at kv_index [tokens].

    pool: one layer's view [pages, 2, page_size, kv_heads, head_dim]; kv_index int32: page * page_size + offset, or -1.
    """
    tokens, (_, _, page_size, kv_heads, head_dim) = kv_index.shape[0], pool.shape
    if not tokens:
        return
    dim_block = next_power_of_2(head_dim)
    block = min(next_power_of_2(page_size), max(1, _BOUNDED_ELEMENTS // dim_block))
    _bound_pages[(kv_heads, cdiv(tokens, _BOUNDED_TOKENS))](
        pool,
        kv_index,
        bounds,
        pool.stride(0),
        pool.stride(2),
        bounds.stride(0),
        tokens,
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        PAGE_SIZE=page_size,
        TOKENS=_BOUNDED_TOKENS,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
