"""Scratch: the plain Triton kernel with K and V by TMA descriptors."""

import triton
import triton.language as tl


@triton.jit
def _scan(query, total, mass, top, pages, table, column, first, last, positions, end, rows_of_page, scale,
          MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(first, last, BLOCK):
        row = tl.load(table + start // PAGE_SIZE) * rows_of_page + start % PAGE_SIZE
        keys = pages.load([row, column])
        scores = tl.dot(query, keys.T)
        tokens = start + tl.arange(0, BLOCK)
        if MASKED:
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = new_top * scale
        weights = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(top * scale - shift)
        mass = mass * decay + tl.sum(weights, axis=1)
        values = pages.load([row + PAGE_SIZE, column])
        if MASKED:
            values = tl.where((tokens < end)[:, None], values, 0.0)
        total = tl.dot(weights.to(values.dtype), values, total * decay[:, None])
        top = new_top
    return total, mass, top


@triton.jit
def kernel(q, pages, page_tables, query_starts, ends, out, q_stride, rows_of_page, table_stride, out_stride, scale,
           group, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    begin = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - begin
    if tile * ROWS >= count:
        return
    end = tl.load(ends + sequence)
    queries = tile * ROWS + tl.arange(0, ROWS)
    positions = end - count + queries
    first_position = end - count + tile * ROWS
    high = tl.minimum(first_position + ROWS, end)
    middle = (first_position + 1) // BLOCK * BLOCK
    dims = tl.arange(0, HEAD_DIM)
    inside = (queries < count)[:, None]
    address = (begin + queries).to(tl.int64)[:, None]
    query = tl.load(q + address * q_stride + head * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    table = page_tables + sequence.to(tl.int64) * table_stride
    column = head // group * HEAD_DIM
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    total, mass, top = _scan(query, total, mass, top, pages, table, column, 0, middle, positions, end, rows_of_page,
                             scale, False, PAGE_SIZE, BLOCK)
    total, mass, top = _scan(query, total, mass, top, pages, table, column, middle, high, positions, end, rows_of_page,
                             scale, True, PAGE_SIZE, BLOCK)
    result = (total / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + address * out_stride + head * HEAD_DIM + dims[None, :], result, mask=inside)
