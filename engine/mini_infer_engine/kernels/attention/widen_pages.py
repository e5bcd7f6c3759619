"""Widens the one-byte pages of a pass's sequences to 16 bits, in scratch memory, layer by layer.

Kernels that support only 16-bit pages read them. The values are those of `QuantizedKVPool.read`: an element times the
scale of its token and head, rounded to the dtype of attention. Pages are side by side, those of the first sequence
first. Does not know which kernel reads them.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.attention.quantized_rows import first_scale, widened
from mini_infer_engine.kernels.sizes import next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace

_BLOCK_BYTES = 4096
"""Bytes of one-byte elements that a program loads at a time: two loads of 16 bytes in each of 128 threads."""
WIDENING_PROGRAMS_PER_SM = 8
"""Programs per SM: as many as fit with the 64 registers of a thread that such a block takes."""
_LARGEST_FP16: tl.constexpr = tl.constexpr(65504.0)


@triton.jit
def _find_page(query_starts, ends, sequences, page_of_all, PAGE_SIZE: tl.constexpr):
    """Returns the sequence of a page of all sequences, and the page's number within it, or -1 after the last.

    Sequences without new tokens have no pages: nothing attends to them, and padding of a captured pass consists of
    such.
    """
    lanes = tl.arange(0, 64)
    sequence = 0
    page = -1
    before = 0
    for first in range(0, sequences, 64):
        mask = first + lanes < sequences
        starts = tl.load(query_starts + first + lanes, mask=mask, other=0)
        stops = tl.load(query_starts + first + lanes + 1, mask=mask, other=0)
        lengths = tl.load(ends + first + lanes, mask=mask, other=0)
        pages = tl.where(stops > starts, tl.cdiv(lengths, PAGE_SIZE), 0)
        pages_up_to = before + tl.cumsum(pages)
        after = before + tl.sum(pages)
        if (before <= page_of_all) & (page_of_all < after):
            lane = tl.sum((pages_up_to <= page_of_all).to(tl.int32))
            sequence = first + lane
            page = page_of_all - tl.sum(tl.where(lanes == lane, pages_up_to - pages, 0))
        before = after
    return sequence, page


@triton.jit(
    do_not_specialize=["sequences", "items", "table_stride", "wide_table_stride"],
    do_not_specialize_on_alignment=["page_tables", "query_starts", "ends", "wide_tables"],
)
def _widen_pages(
    pool,
    page_tables,
    query_starts,
    ends,
    wide,
    wide_tables,
    page_stride,
    kv_stride,
    token_stride,
    table_stride,
    wide_table_stride,
    sequences,
    items,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Widens with persistent programs. Each of a program's items is a page's keys or values of one KV head."""
    item = tl.program_id(0)
    sequence, page = _find_page(query_starts, ends, sequences, item // (2 * KV_HEADS), PAGE_SIZE)
    while (page >= 0) & (item < items):
        wide_page = item // (2 * KV_HEADS)
        half = item // KV_HEADS % 2
        kv_head = item % KV_HEADS
        end = tl.load(ends + sequence)
        source_page = tl.load(page_tables + sequence.to(tl.int64) * table_stride + page).to(tl.int64)
        if item % (2 * KV_HEADS) == 0:
            tl.store(wide_tables + sequence.to(tl.int64) * wide_table_stride + page, wide_page)
        scale_at = first_scale(pool, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE) + source_page * (page_stride // 2)
        scale_at += half * (kv_stride // 2)
        source = pool + source_page * page_stride + half * kv_stride + kv_head * HEAD_DIM
        first_token = (wide_page.to(tl.int64) * 2 + half) * PAGE_SIZE
        dims = tl.arange(0, DIM_BLOCK)[None, :]
        for start in range(0, PAGE_SIZE, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            # Nothing is left undefined behind a sequence's end: attention multiplies it by zero.
            valid = (tokens < end - page * PAGE_SIZE) & (tokens < PAGE_SIZE)
            inside = valid[:, None] & (dims < HEAD_DIM)
            scales = tl.load(scale_at + tokens, mask=valid, other=0.0).to(tl.float32)
            values = tl.load(source + tokens[:, None] * token_stride + dims, mask=inside, other=0.0)
            result = widened(values, tl.float16).to(tl.float32) * scales[:, None]
            if wide.dtype.element_ty == tl.float16:  # a scale is rounded up, by which the largest would be infinite
                result = tl.minimum(tl.maximum(result, -_LARGEST_FP16), _LARGEST_FP16)
            target = wide + ((first_token + tokens)[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims
            tl.store(target, result.to(wide.dtype.element_ty), mask=(tokens < PAGE_SIZE)[:, None] & (dims < HEAD_DIM))
        item += tl.num_programs(0)
        sequence, page = _find_page(query_starts, ends, sequences, item // (2 * KV_HEADS), PAGE_SIZE)


def wide_page_bytes(pool: torch.Tensor, dtype: torch.dtype) -> int:
    """Returns the bytes of a layer's page [2, page_size, kv_heads, head_dim] in `dtype`, given the layer's pages."""
    return pool[0].numel() * dtype.itemsize


def widen_pages(
    pool: torch.Tensor, rows: PrefillRows, dtype: torch.dtype, *, workspace: Workspace, programs: int
) -> tuple[torch.Tensor, PrefillRows]:
    """Widens the pages of these rows' sequences to `dtype` in the workspace. Returns the pages, and the rows over them.

    pool: one layer's view [pages, 2, page_size, kv_heads, head_dim] of one byte an element. `KernelPolicy` ensures that
    all pages of `rows` fit. The next call overwrites them. The grid, `programs` at most, and all addresses do not
    depend on lengths, so that a CUDA graph may contain this.
    """
    _, _, page_size, kv_heads, head_dim = pool.shape
    shape = (2, page_size, kv_heads, head_dim)
    count = workspace.wide_pages.numel() // wide_page_bytes(pool, dtype)
    assert rows.pages <= count, f"{rows.pages} pages, but the scratch holds {count}: KernelPolicy.prefill_config"
    wide = workspace.wide_pages[: count * wide_page_bytes(pool, dtype)].view(dtype).view(count, *shape)
    tables = torch.empty_like(rows.page_tables, memory_format=torch.contiguous_format)
    items = rows.pages * 2 * kv_heads
    dim_block = next_power_of_2(head_dim)
    _widen_pages[(max(1, min(items, programs)),)](
        pool,
        rows.page_tables,
        rows.query_starts,
        rows.ends,
        wide,
        tables,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        rows.page_tables.stride(0),
        tables.stride(0),
        rows.ends.shape[0],
        items,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        PAGE_SIZE=page_size,
        BLOCK=min(next_power_of_2(page_size), max(16, _BLOCK_BYTES // dim_block)),
        num_warps=4,
    )
    return wide, replace(rows, page_tables=tables)
