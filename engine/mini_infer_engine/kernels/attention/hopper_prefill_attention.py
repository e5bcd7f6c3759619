"""Causal attention of long prompts over their paged KV cache on Hopper: FlashAttention-3's structure (Shah et al.,
arXiv:2407.08608) in Gluon.

A tile is 128 queries of one head. One warp has the copy engine fetch queries, keys and values, through the page table;
two warpgroups of four warps have 64 of the queries each. While the tensor cores multiply for one warpgroup the other
does its softmax, and within a warpgroup the scores of the next block are under way during the softmax of this one. It
knows no windows, no fp32, and no sharing of a tile's keys between programs.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mini_infer_engine.kernels.attention.attention_config import HopperPrefillConfig
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.pdl import grid_dependency_wait
from mini_infer_engine.kernels.sizes import LOG2_E

HALF_ROWS = gl.constexpr(64)
"""Queries of a warpgroup: what one instruction of the tensor cores takes."""
ROWS = gl.constexpr(128)
BLOCK = gl.constexpr(128)
STAGES = gl.constexpr(2)


class _Work(NamedTuple):
    """What tiles there are."""

    query_starts: Any
    ends: Any
    sequences: Any
    heads: Any


class _Ring(NamedTuple):
    """Blocks of shared memory that are filled and emptied in turns."""

    blocks: Any
    full: Any
    empty: Any


@gluon.jit
def _find_tile(turn, sequence, before, work):
    """What this program does in its `turn`, and its next: -1 where all is done, and this has no blocks.

    Searched from an earlier turn's `sequence` on; `before` are the tiles of the sequences before that. A sequence
    begins with its last tile, the longest. Every other turn goes backwards, so that all programs have long and short
    tiles alike.
    """
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    item = turn * gl.num_programs(0) + place
    tokens = gl.load(work.query_starts + work.sequences)
    begin = gl.load(work.query_starts + sequence)
    stop = gl.load(work.query_starts + sequence + 1)
    tiles = gl.cdiv(stop - begin, ROWS)
    while (item // work.heads >= before + tiles) & (stop < tokens):
        before += tiles
        sequence += 1
        begin = stop
        stop = gl.load(work.query_starts + sequence + 1)
        tiles = gl.cdiv(stop - begin, ROWS)
    first_row = (before + tiles - 1 - item // work.heads) * ROWS
    end = gl.load(work.ends + sequence)
    first_position = end - (stop - begin) + first_row
    exists = first_row >= 0
    blocks = gl.where(exists, gl.cdiv(gl.minimum(first_position + ROWS, end), BLOCK), 0)
    turn = gl.where(exists, turn + 1, -1)
    return turn, sequence, before, item % work.heads, begin + first_row, stop, first_position, end, blocks


@gluon.jit
def _fill(pages, row, column, ring, number):
    """Fetch a block as the ring's `number`-th."""
    stage = number % STAGES
    mbarrier.wait(ring.empty.index(stage), number // STAGES & 1 ^ 1)
    mbarrier.expect(ring.full.index(stage), pages.block_type.nbytes)
    tma.async_copy_global_to_shared(pages, [row, column], ring.full.index(stage), ring.blocks.index(stage))


@gluon.jit
def _produce(q, pages, page_tables, table_stride, work, rings, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr,
             ROWS_OF_PAGE: gl.constexpr):  # fmt: skip
    """One warp: fetches what the others read, as far ahead as the rings allow."""
    queries, keys, values, _turns = rings
    head_dim: gl.constexpr = pages.block_shape[1]
    turn, tiles_done, number, sequence, before = 0, 0, 0, 0, 0
    while turn >= 0:
        turn, sequence, before, head, query_row, _stop, _first, _end, blocks = _find_tile(turn, sequence, before, work)
        # Launched ahead: what says which tiles there are is older than the kernel before, which writes what they read.
        grid_dependency_wait()
        if blocks > 0:
            mbarrier.wait(queries.empty, tiles_done & 1 ^ 1)
            mbarrier.expect(queries.full, 2 * q.block_type.nbytes)
            for half in gl.static_range(2):
                place = [query_row + half * HALF_ROWS, head * head_dim]
                tma.async_copy_global_to_shared(q, place, queries.full, queries.blocks.index(half))
            tiles_done += 1
            table = page_tables + sequence.to(gl.int64) * table_stride
            column = head // GROUP * head_dim
            row = 0
            for block in range(blocks + 1):  # values one step behind keys, as they are read
                values_row = row + PAGE_SIZE
                if block < blocks:
                    token = (blocks - 1 - block) * BLOCK
                    row = gl.load(table + token // PAGE_SIZE) * ROWS_OF_PAGE + token % PAGE_SIZE
                    _fill(pages, row, column, keys, number + block)
                if block > 0:
                    _fill(pages, values_row, column, values, number + block - 1)
            number += blocks


@gluon.jit
def _weigh(scores, top, mass, positions, block, scale, MASKED: gl.constexpr):
    """The softmax so far: weights of these scores, the factor for what came before, new maximum and mass."""
    if MASKED:
        tokens = block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    shift = new_top * scale
    if MASKED:
        shift = gl.where(new_top == float("-inf"), 0.0, shift)  # a row that has seen nothing yet
    decay = gl.exp2(top * scale - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    return weights, decay, new_top, mass * decay + gl.sum(weights, axis=1)


@gluon.jit
def _step(query, state, positions, block, scale, number, tiles_done, rings, HALF: gl.constexpr, MASKED: gl.constexpr):
    """Scores of `block`, the rings' `number`-th, and their softmax while the values of the one before are summed."""
    total, weights, top, mass = state
    _queries, keys, values, turns = rings
    score_layout: gl.constexpr = weights.type.layout
    stage, before = number % STAGES, (number - 1) % STAGES
    phase_before = (number - 1) // STAGES & 1
    factors = gl.convert_layout(weights.to(values.blocks.dtype), gl.DotOperandLayout(0, total.type.layout, 2))
    mbarrier.wait(keys.full.index(stage), number // STAGES & 1)
    # A tile has one step less than blocks.
    mbarrier.wait(turns[HALF], (number - 1 - tiles_done) & 1 ^ (1 - HALF))
    nothing = gl.zeros([HALF_ROWS, BLOCK], gl.float32, score_layout)
    scores = warpgroup_mma(query, keys.blocks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(values.full.index(before), phase_before)
    total = warpgroup_mma(factors, values.blocks.index(before), total, is_async=True)
    mbarrier.arrive(turns[1 - HALF])
    scores = mma_wait(1, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage))
    weights, decay, top, mass = _weigh(scores, top, mass, positions, block, scale, MASKED)
    # Holds already. Its branch keeps the assembler from waiting for the sum before the softmax.
    mbarrier.wait(values.full.index(before), phase_before)
    total = mma_wait(0, deps=[total])
    mbarrier.arrive(values.empty.index(before))
    decay = gl.convert_layout(decay, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return total * decay[:, None], weights, top, mass


@gluon.jit
def _consume(out, scale, work, rings, OUT_PITCH: gl.constexpr, HALF: gl.constexpr):
    """One warpgroup: its half of every tile."""
    queries, keys, values, _turns = rings
    head_dim: gl.constexpr = keys.blocks.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])
    query = queries.blocks.index(HALF)
    turn, tiles_done, number, sequence, before = 0, 0, 0, 0, 0
    while turn >= 0:
        turn, sequence, before, head, query_row, stop, first_position, end, blocks = _find_tile(
            turn, sequence, before, work
        )
        if blocks > 0:
            query_row += HALF * HALF_ROWS
            first_position += HALF * HALF_ROWS
            positions = first_position + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, score_layout))

            # The last block's scores; nothing to sum yet.
            stage, phase = number % STAGES, number // STAGES & 1
            mbarrier.wait(queries.full, tiles_done & 1)
            mbarrier.wait(keys.full.index(stage), phase)
            nothing = gl.zeros([HALF_ROWS, BLOCK], gl.float32, score_layout)
            scores = warpgroup_mma(query, keys.blocks.index(stage).permute((1, 0)), nothing, use_acc=False)
            mbarrier.arrive(keys.empty.index(stage))
            top = gl.full([HALF_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
            mass = gl.zeros([HALF_ROWS], gl.float32, gl.SliceLayout(1, score_layout))
            weights, _decay, top, mass = _weigh(scores, top, mass, positions, blocks - 1, scale, True)
            total = gl.zeros([HALF_ROWS, head_dim], gl.float32, total_layout)
            if blocks * BLOCK > end:
                # Weights behind a sequence's end are 0, but 0 * NaN is NaN. The other warpgroup may clear it as well.
                mbarrier.wait(values.full.index(stage), phase)
                tokens = (blocks - 1) * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, row_layout))
                block = values.blocks.index(stage)
                block.store(gl.where((tokens < end)[:, None], block.load(row_layout), 0.0))
                fence_async_shared()
                gl.thread_barrier()

            # Backwards: blocks that the diagonal crosses, then those that every row sees.
            masked = gl.maximum(1, blocks - (first_position + 1) // BLOCK)
            state = (total, weights, top, mass)
            for done in range(1, masked):
                state = _step(query, state, positions, blocks - 1 - done, scale, number + done, tiles_done, rings, HALF,
                              True)  # fmt: skip
            for done in range(masked, blocks):
                state = _step(query, state, positions, blocks - 1 - done, scale, number + done, tiles_done, rings, HALF,
                              False)  # fmt: skip
            mbarrier.arrive(queries.empty)
            total, weights, top, mass = state
            number += blocks
            tiles_done += 1

            # The first block's values.
            stage, phase = (number - 1) % STAGES, (number - 1) // STAGES & 1
            mbarrier.wait(values.full.index(stage), phase)
            factors = gl.convert_layout(weights.to(values.blocks.dtype), gl.DotOperandLayout(0, total_layout, 2))
            total = warpgroup_mma(factors, values.blocks.index(stage), total)
            mbarrier.arrive(values.empty.index(stage))
            mass = gl.convert_layout(mass, gl.SliceLayout(1, total_layout), assert_trivial=True)
            result = gl.convert_layout((total * (1.0 / mass)[:, None]).to(values.blocks.dtype), row_layout)
            out_rows = query_row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, row_layout))
            columns = head * head_dim + gl.arange(0, head_dim, layout=gl.SliceLayout(0, row_layout))
            address = out_rows.to(gl.int64)[:, None] * OUT_PITCH + columns[None, :]
            gl.store(out + address, result, mask=(out_rows < stop)[:, None])


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit(
    do_not_specialize=["table_stride", "sequences"],
    do_not_specialize_on_alignment=["page_tables", "query_starts", "ends"],
)
def _hopper_prefill_attention(q, pages, page_tables, query_starts, ends, out, table_stride, sequences, scale,
                              HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr,
                              ROWS_OF_PAGE: gl.constexpr, OUT_PITCH: gl.constexpr):  # fmt: skip
    """Programs take (tile, head) in turns."""
    head_dim: gl.constexpr = pages.block_shape[1]
    query_shared = gl.allocate_shared_memory(q.dtype, [2, HALF_ROWS, head_dim], q.layout)
    keys_shared = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK, head_dim], pages.layout)
    values_shared = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK, head_dim], pages.layout)
    rings = (
        _Ring(query_shared, _barriers(1, 1).index(0), _barriers(1, 2).index(0)),
        _Ring(keys_shared, _barriers(STAGES, 1), _barriers(STAGES, 2)),
        _Ring(values_shared, _barriers(STAGES, 1), _barriers(STAGES, 2)),
        (_barriers(1, 1).index(0), _barriers(1, 1).index(0)),  # apart: the compiler orders uses of one allocation
    )
    fence_async_shared()
    work = _Work(query_starts, ends, sequences, HEADS)
    gl.warp_specialize(
        [
            (_consume, (out, scale, work, rings, OUT_PITCH, 0)),
            (_consume, (out, scale, work, rings, OUT_PITCH, 1)),
            (_produce, (q, pages, page_tables, table_stride, work, rings, GROUP, PAGE_SIZE, ROWS_OF_PAGE)),
        ],
        [4, 1],
        [240, 24],  # registers of a thread
    )


@functools.lru_cache(maxsize=1024)
def _descriptor(address: int, dtype: torch.dtype, rows: int, pitch: int, block_rows: int, width: int) -> Any:
    """How the copy engine reads blocks [block_rows, width] of `rows` rows, `pitch` elements from one to the next."""
    memory = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # a tensor would stay alive in the cache
    block = [block_rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(memory, [rows, pitch], [pitch, 1], block, layout)


def hopper_prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: PrefillRows,
    *,
    scale: float,
    config: HopperPrefillConfig,
    out: torch.Tensor,
) -> None:
    """As `prefill_attention.prefill_attention`, of what `attention_config.supports_hopper_fa3` lets through.

    It is launched ahead, and reads `rows` at once: the kernel right before it must not have written them.
    """
    tokens, heads, head_dim = q.shape
    pages, _, page_size, kv_heads, _ = pool.shape
    page_pitch, _, token_pitch, _, _ = pool.stride()
    rows_of_page = page_pitch // token_pitch  # of all layers
    kv_rows = (pages - 1) * rows_of_page + 2 * page_size
    sequences = rows.ends.shape[0]
    items = (tokens // ROWS.value + sequences) * heads  # at most: each sequence may end with a part of a tile
    programs = min(items, config.programs)
    constants = (heads, heads // kv_heads, page_size, rows_of_page, out.stride(0))
    arguments = (
        _descriptor(q.data_ptr(), q.dtype, tokens, q.stride(0), HALF_ROWS.value, head_dim),
        _descriptor(pool.data_ptr(), pool.dtype, kv_rows, token_pitch, BLOCK.value, head_dim),
        *(rows.page_tables, rows.query_starts, rows.ends, out, rows.page_tables.stride(0), sequences),
        scale * LOG2_E,
        *constants,
    )
    # To find the compiled kernel by its arguments takes Triton twice as long as the rest of a launch.
    variant = (q.device, q.dtype, head_dim, constants)
    if variant in _COMPILED:
        _COMPILED[variant][(programs, 1, 1)](*arguments)
    else:
        _COMPILED[variant] = _hopper_prefill_attention[(programs,)](*arguments, num_warps=4, launch_pdl=True)


_COMPILED: dict[tuple[Any, ...], Any] = {}
