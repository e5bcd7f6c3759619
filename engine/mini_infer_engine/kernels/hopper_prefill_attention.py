"""Causal attention of long prompts over their paged KV cache on Hopper: FlashAttention-3 (Shah et al.,
arXiv:2407.08608) in Gluon.

A program takes tiles of ROWS queries of one head, longest first. One warp copies queries, keys and values to shared
memory by TMA, through the page table; each warpgroup of four warps keeps 64 of the queries. While the tensor cores
multiply for one warpgroup the other has its softmax, and within a warpgroup the scores of the next block are under way
during the softmax of this one. It knows no windows and no fp32.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mini_infer_engine.attention.prefill_rows import PrefillRows

ROWS_OF_WARPGROUP = gl.constexpr(64)


@gluon.jit
def _tile(turn, work, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """What this program does in its `turn`; every other turn backwards, so that all have long and short tiles alike."""
    query_starts, ends, tiles, sequences, heads = work
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    item = turn * programs + place
    head = item % heads
    sequence = item // heads % sequences
    first_row = (tiles - 1 - item // heads // sequences) * ROWS
    begin = 0
    count = 0
    end = 0
    blocks = 0
    if item < tiles * sequences * heads:
        begin = gl.load(query_starts + sequence)
        count = gl.load(query_starts + sequence + 1) - begin
        end = gl.load(ends + sequence)
        if first_row < count:
            blocks = gl.cdiv(gl.minimum(end - count + first_row + ROWS, end), BLOCK)
    return head, sequence, first_row, begin, count, end, blocks


@gluon.jit
def _turns_of(work):
    _query_starts, _ends, tiles, sequences, heads = work
    return gl.cdiv(tiles * sequences * heads, gl.num_programs(0))


@gluon.jit
def _fill(descriptor, row, column, ring, full, empty, number, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Copy a block to the ring as its `number`-th."""
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), number // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    tma.async_copy_global_to_shared(descriptor, [row, column], full.index(stage), ring.index(stage))


@gluon.jit
def _produce(inputs, shared, barriers, PAGE_SIZE: gl.constexpr):
    """One warp: copies what the others read, as far ahead as the rings allow."""
    queries, pages, page_tables, table_stride, rows_of_page, group, work = inputs
    query_shared, keys_shared, values_shared = shared
    query_full, query_empty, keys_full, keys_empty, values_full, values_empty, _turns = barriers
    CONSUMERS: gl.constexpr = query_shared.shape[0]
    STAGES: gl.constexpr = keys_shared.shape[0]
    BLOCK: gl.constexpr = keys_shared.shape[1]
    HEAD_DIM: gl.constexpr = keys_shared.shape[2]
    ROWS: gl.constexpr = CONSUMERS * ROWS_OF_WARPGROUP
    BYTES: gl.constexpr = BLOCK * HEAD_DIM * 2
    tiles_done = 0
    number = 0
    for turn in range(_turns_of(work)):
        head, sequence, first_row, begin, _count, _end, blocks = _tile(turn, work, ROWS, BLOCK)
        if blocks > 0:
            mbarrier.wait(query_empty, tiles_done & 1 ^ 1)
            mbarrier.expect(query_full, ROWS * HEAD_DIM * 2)
            for part in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    queries, [begin + first_row + part * ROWS_OF_WARPGROUP, head * HEAD_DIM], query_full,
                    query_shared.index(part),
                )  # fmt: skip
            tiles_done += 1
            table = page_tables + sequence.to(gl.int64) * table_stride
            column = head // group * HEAD_DIM
            token = (blocks - 1) * BLOCK
            row = gl.load(table + token // PAGE_SIZE) * rows_of_page + token % PAGE_SIZE
            _fill(pages, row, column, keys_shared, keys_full, keys_empty, number, BYTES, STAGES)
            for _block in range(1, blocks):
                token -= BLOCK
                next_row = gl.load(table + token // PAGE_SIZE) * rows_of_page + token % PAGE_SIZE
                _fill(pages, next_row, column, keys_shared, keys_full, keys_empty, number + 1, BYTES, STAGES)
                _fill(pages, row + PAGE_SIZE, column, values_shared, values_full, values_empty, number, BYTES, STAGES)
                row = next_row
                number += 1
            _fill(pages, row + PAGE_SIZE, column, values_shared, values_full, values_empty, number, BYTES, STAGES)
            number += 1


@gluon.jit
def _weigh(scores, top, mass, positions, token, scale, MASKED: gl.constexpr):
    """The softmax so far: weights of these scores, the factor for what came before, new mass and maximum."""
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        tokens = token + gl.arange(0, scores.shape[1], layout=columns)
        scores = gl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    shift = new_top * scale
    if MASKED:
        shift = gl.where(new_top == float("-inf"), 0.0, shift)  # a row that has seen nothing yet
    decay = gl.exp2(top * scale - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    return weights, decay, mass * decay + gl.sum(weights, axis=1), new_top


@gluon.jit
def _step(query, total, weights, top, mass, positions, token, scale, number, tiles_done, shared, barriers,
          WARPGROUP: gl.constexpr, TURNS: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Scores of block `number`, and their softmax while the values of the block before are summed."""
    query_shared, keys_shared, values_shared = shared
    _query_full, _query_empty, keys_full, keys_empty, values_full, values_empty, turns = barriers
    CONSUMERS: gl.constexpr = query_shared.shape[0]
    STAGES: gl.constexpr = keys_shared.shape[0]
    BLOCK: gl.constexpr = keys_shared.shape[1]
    score_layout: gl.constexpr = weights.type.layout
    stage = number % STAGES
    before = (number - 1) % STAGES
    phase_before = (number - 1) // STAGES & 1
    factors = gl.convert_layout(weights.to(values_shared.dtype), gl.DotOperandLayout(0, total.type.layout, 2))
    mbarrier.wait(keys_full.index(stage), number // STAGES & 1)
    if TURNS:
        # A tile has one step less than blocks.
        mbarrier.wait(turns[WARPGROUP], (number - 1 - tiles_done) & 1 ^ (1 if WARPGROUP == 0 else 0))
    nothing = gl.zeros([ROWS_OF_WARPGROUP, BLOCK], gl.float32, score_layout)
    scores = warpgroup_mma(query, keys_shared.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(values_full.index(before), phase_before)
    total = warpgroup_mma(factors, values_shared.index(before), total, is_async=True)
    if TURNS:
        mbarrier.arrive(turns[(WARPGROUP + 1) % CONSUMERS])
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys_empty.index(stage))
    weights, decay, mass, top = _weigh(scores, top, mass, positions, token, scale, MASKED)
    # Holds already. Its branch keeps the assembler from waiting for the sum before the softmax.
    mbarrier.wait(values_full.index(before), phase_before)
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(values_empty.index(before))
    decay = gl.convert_layout(decay, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return total * decay[:, None], weights, top, mass


@gluon.jit
def _consume(outputs, shared, barriers, WARPGROUP: gl.constexpr, TURNS: gl.constexpr):
    """One warpgroup: 64 queries of every tile."""
    out, out_stride, scale, work = outputs
    query_shared, keys_shared, values_shared = shared
    query_full, query_empty, keys_full, keys_empty, values_full, values_empty, _turns = barriers
    CONSUMERS: gl.constexpr = query_shared.shape[0]
    STAGES: gl.constexpr = keys_shared.shape[0]
    BLOCK: gl.constexpr = keys_shared.shape[1]
    HEAD_DIM: gl.constexpr = keys_shared.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = CONSUMERS * ROWS_OF_WARPGROUP
    dtype: gl.constexpr = out.dtype.element_ty
    query = query_shared.index(WARPGROUP)
    tiles_done = 0
    number = 0
    for turn in range(_turns_of(work)):
        head, _sequence, first_row, begin, count, end, blocks = _tile(turn, work, ROWS, BLOCK)
        if blocks > 0:
            first_row += WARPGROUP * ROWS_OF_WARPGROUP
            first_position = end - count + first_row
            positions = first_position + gl.arange(0, ROWS_OF_WARPGROUP, layout=gl.SliceLayout(1, score_layout))
            token = (blocks - 1) * BLOCK
            stage = number % STAGES

            # The last block's scores; nothing to sum yet.
            mbarrier.wait(query_full, tiles_done & 1)
            mbarrier.wait(keys_full.index(stage), number // STAGES & 1)
            nothing = gl.zeros([ROWS_OF_WARPGROUP, BLOCK], gl.float32, score_layout)
            scores = warpgroup_mma(query, keys_shared.index(stage).permute((1, 0)), nothing, use_acc=False)
            mbarrier.arrive(keys_empty.index(stage))
            top = gl.full([ROWS_OF_WARPGROUP], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
            mass = gl.zeros([ROWS_OF_WARPGROUP], gl.float32, gl.SliceLayout(1, score_layout))
            weights, _decay, mass, top = _weigh(scores, top, mass, positions, token, scale, True)
            total = gl.zeros([ROWS_OF_WARPGROUP, HEAD_DIM], gl.float32, total_layout)
            if token + BLOCK > end:
                _clear_after_end(
                    values_shared.index(stage), values_full.index(stage), number // STAGES & 1, end - token
                )

            # Backwards: blocks that the diagonal crosses, then those that every row sees.
            masked = blocks - (first_position + 1) // BLOCK
            for _block in range(1, masked):
                token -= BLOCK
                number += 1
                total, weights, top, mass = _step(
                    query, total, weights, top, mass, positions, token, scale, number, tiles_done, shared, barriers,
                    WARPGROUP, TURNS, True,
                )  # fmt: skip
            for _block in range(gl.maximum(masked, 1), blocks):
                token -= BLOCK
                number += 1
                total, weights, top, mass = _step(
                    query, total, weights, top, mass, positions, token, scale, number, tiles_done, shared, barriers,
                    WARPGROUP, TURNS, False,
                )  # fmt: skip
            mbarrier.arrive(query_empty)
            tiles_done += 1

            stage = number % STAGES
            mbarrier.wait(values_full.index(stage), number // STAGES & 1)
            factors = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, total_layout, 2))
            total = warpgroup_mma(factors, values_shared.index(stage), total)
            mbarrier.arrive(values_empty.index(stage))
            number += 1

            mass = gl.convert_layout(mass, gl.SliceLayout(1, total_layout), assert_trivial=True)
            result = gl.convert_layout((total * (1.0 / mass)[:, None]).to(dtype), store_layout)
            rows = first_row + gl.arange(0, ROWS_OF_WARPGROUP, layout=gl.SliceLayout(1, store_layout))
            columns = head * HEAD_DIM + gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, store_layout))
            address = (begin + rows).to(gl.int64)[:, None] * out_stride + columns[None, :]
            gl.store(out + address, result, mask=(rows < count)[:, None])


@gluon.jit
def _clear_after_end(values, full, phase, inside):
    """Zero what stands after a sequence's end: weights there are 0, but 0 * NaN is NaN. Others may do it as well."""
    mbarrier.wait(full, phase)
    BLOCK: gl.constexpr = values.shape[0]
    HEAD_DIM: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    tokens = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    values.store(gl.where((tokens < inside)[:, None], values.load(layout), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit(
    do_not_specialize=["tiles", "sequences", "heads", "group", "rows_of_page", "table_stride"],
    do_not_specialize_on_alignment=["page_tables", "query_starts", "ends"],
)
def _hopper_prefill_attention(
    queries,
    pages,
    page_tables,
    query_starts,
    ends,
    out,
    tiles,
    sequences,
    heads,
    group,
    rows_of_page,
    table_stride,
    out_stride,
    scale,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Programs take (tile, sequence, head) in turns."""
    dtype: gl.constexpr = out.dtype.element_ty
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    query_shared = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS_OF_WARPGROUP, HEAD_DIM], queries.layout)
    keys_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], pages.layout)
    values_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], pages.layout)
    query_full = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    query_empty = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    keys_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    values_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    # Each its own allocation: the compiler would put a barrier between uses of one.
    turns = (
        gl.allocate_shared_memory(gl.int64, [1], barrier_layout),
        gl.allocate_shared_memory(gl.int64, [1], barrier_layout),
        gl.allocate_shared_memory(gl.int64, [1], barrier_layout),
    )
    mbarrier.init(query_full, count=1)
    mbarrier.init(query_empty, count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(stage), count=1)
        mbarrier.init(values_full.index(stage), count=1)
        mbarrier.init(keys_empty.index(stage), count=CONSUMERS)
        mbarrier.init(values_empty.index(stage), count=CONSUMERS)
    for warpgroup in gl.static_range(CONSUMERS):
        mbarrier.init(turns[warpgroup], count=1)
    fence_async_shared()
    shared = (query_shared, keys_shared, values_shared)
    barriers = (query_full, query_empty, keys_full, keys_empty, values_full, values_empty, turns)
    work = (query_starts, ends, tiles, sequences, heads)
    inputs = (queries, pages, page_tables, table_stride, rows_of_page, group, work)
    outputs = (out, out_stride, scale, work)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (outputs, shared, barriers, 0, TURNS)),
                (_consume, (outputs, shared, barriers, 1, TURNS)),
                (_produce, (inputs, shared, barriers, PAGE_SIZE)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (outputs, shared, barriers, 0, TURNS)),
                (_consume, (outputs, shared, barriers, 1, TURNS)),
                (_consume, (outputs, shared, barriers, 2, TURNS)),
                (_produce, (inputs, shared, barriers, PAGE_SIZE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def _rows_descriptor(rows: torch.Tensor, count: int, block: tuple[int, int]) -> TensorDescriptor:
    """A descriptor of `count` rows from where `rows` begins; rows.stride(0) elements from one to the next."""
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    pitch = rows.stride(0)
    return TensorDescriptor(rows, [count, pitch], [pitch, 1], list(block), layout)


def hopper_prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: PrefillRows,
    *,
    scale: float,
    out: torch.Tensor,
    consumers: int = 2,
    block: int = 128,
    stages: int = 2,
    turns: bool = True,
    persistent: bool = True,
    consumer_registers: int = 240,
    producer_registers: int = 24,
) -> None:
    """As `prefill_attention.prefill_attention`."""
    tokens, heads, head_dim = q.shape
    pages, _, page_size, kv_heads, _ = pool.shape
    page_pitch, _, token_pitch, _, _ = pool.stride()
    rows_of_page = page_pitch // token_pitch  # of all layers
    sequences = rows.ends.shape[0]
    tiles = triton.cdiv(rows.longest_query, 64 * consumers)
    items = tiles * sequences * heads
    kv_rows = (pages - 1) * rows_of_page + 2 * page_size
    _hopper_prefill_attention[(min(items, 132) if persistent else items,)](
        _rows_descriptor(q, tokens, (64, head_dim)),
        _rows_descriptor(pool.as_strided((2, token_pitch), (token_pitch, 1)), kv_rows, (block, head_dim)),
        rows.page_tables,
        rows.query_starts,
        rows.ends,
        out,
        tiles,
        sequences,
        heads,
        heads // kv_heads,
        rows_of_page,
        rows.page_tables.stride(0),
        out.stride(0),
        scale * 1.4426950408889634,  # powers of two are what the hardware has
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        CONSUMERS=consumers,
        BLOCK=block,
        STAGES=stages,
        TURNS=turns,
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=producer_registers,
        num_warps=4,
    )
