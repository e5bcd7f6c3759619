"""FlashAttention-3 (Shah et al., arXiv:2407.08608) in Gluon: causal attention of long prompts over a paged KV cache.

A tile is 128 queries of one head. Warp specialisation: one producer warp has TMA load queries, keys and values, through
the page table; two consumer warpgroups of four warps process 64 of the queries each. Ping-pong scheduling: while the
tensor cores multiply for one warpgroup the other does its softmax, and within a warpgroup the scores of the next block
are computed during the softmax of this one. Does not support sliding windows, fp32, or splitting a tile's keys between
programs.
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
"""Queries of a warpgroup: the M of one wgmma instruction."""
ROWS = gl.constexpr(128)
BLOCK = gl.constexpr(128)
LOG2E = gl.constexpr(LOG2_E)
STAGES = gl.constexpr(2)


class _Tiles(NamedTuple):
    """The input of the tile scheduler."""

    query_starts: Any
    ends: Any
    sequences: Any
    heads: Any


class _Ring(NamedTuple):
    """A ring of blocks in shared memory, with barriers for full and empty ones."""

    blocks: Any
    full: Any
    empty: Any


@gluon.jit
def _next_tile(wave, sequence, tiles_before, work):
    """Schedules tiles for persistent programs: returns this program's tile in a `wave`, and the next wave, -1 after the
    last.

    The search begins at an earlier wave's `sequence`; `tiles_before` are the tiles of the sequences before it. Each
    sequence's last tile, the longest, is first. Every other wave goes backwards, so that all programs have long and
    short tiles alike.
    """
    program = gl.program_id(0)
    if wave % 2 == 1:
        program = gl.num_programs(0) - 1 - program
    item = wave * gl.num_programs(0) + program
    tokens = gl.load(work.query_starts + work.sequences)
    begin = gl.load(work.query_starts + sequence)
    stop = gl.load(work.query_starts + sequence + 1)
    tiles = gl.cdiv(stop - begin, ROWS)
    while (item // work.heads >= tiles_before + tiles) & (stop < tokens):
        tiles_before += tiles
        sequence += 1
        begin = stop
        stop = gl.load(work.query_starts + sequence + 1)
        tiles = gl.cdiv(stop - begin, ROWS)
    first_row = (tiles_before + tiles - 1 - item // work.heads) * ROWS
    end = gl.load(work.ends + sequence)
    first_position = end - (stop - begin) + first_row
    exists = first_row >= 0
    blocks = gl.where(exists, gl.cdiv(gl.minimum(first_position + ROWS, end), BLOCK), 0)
    wave = gl.where(exists, wave + 1, -1)
    return wave, sequence, tiles_before, item % work.heads, begin + first_row, stop, first_position, end, blocks


@gluon.jit
def _load_block(pages, row, column, ring, number):
    """Loads a block by TMA as the ring's `number`-th."""
    stage = number % STAGES
    mbarrier.wait(ring.empty.index(stage), number // STAGES & 1 ^ 1)
    mbarrier.expect(ring.full.index(stage), pages.block_type.nbytes)
    tma.async_copy_global_to_shared(pages, [row, column], ring.full.index(stage), ring.blocks.index(stage))


@gluon.jit
def _producer(q, pages, page_tables, table_stride, work, rings, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr,
             ROWS_OF_PAGE: gl.constexpr):  # fmt: skip
    """Runs the producer warp: loads the consumers' input, as far ahead as the rings allow."""
    queries, keys, values, _order = rings
    head_dim: gl.constexpr = pages.block_shape[1]
    wave, tiles_done, number, sequence, tiles_before = 0, 0, 0, 0, 0
    while wave >= 0:
        wave, sequence, tiles_before, head, query_row, _stop, _first, _end, blocks = _next_tile(
            wave, sequence, tiles_before, work
        )
        # Launched with PDL: only what the tile scheduler reads is older than the kernel before, which writes the rest.
        grid_dependency_wait()
        if blocks > 0:
            mbarrier.wait(queries.empty, tiles_done & 1 ^ 1)
            mbarrier.expect(queries.full, 2 * q.block_type.nbytes)
            for half in gl.static_range(2):
                coordinates = [query_row + half * HALF_ROWS, head * head_dim]
                tma.async_copy_global_to_shared(q, coordinates, queries.full, queries.blocks.index(half))
            tiles_done += 1
            table = page_tables + sequence.to(gl.int64) * table_stride
            column = head // GROUP * head_dim
            row = 0
            for block in range(blocks + 1):  # values one step behind keys, as they are read
                values_row = row + PAGE_SIZE
                if block < blocks:
                    token = (blocks - 1 - block) * BLOCK
                    row = gl.load(table + token // PAGE_SIZE) * ROWS_OF_PAGE + token % PAGE_SIZE
                    _load_block(pages, row, column, keys, number + block)
                if block > 0:
                    _load_block(pages, values_row, column, values, number + block - 1)
            number += blocks


@gluon.jit
def _online_softmax(scores, m_i, l_i, positions, block, scale, MASKED: gl.constexpr):
    """Computes a step of the online softmax: returns p, alpha (the factor for earlier blocks), and new m_i and l_i."""
    if MASKED:
        tokens = block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, axis=1))
    shift = m_new * scale
    if MASKED:
        shift = gl.where(m_new == float("-inf"), 0.0, shift)  # a row without keys so far
    alpha = gl.exp2(m_i * scale - shift)
    p = gl.exp2(scores * scale - shift[:, None])
    return p, alpha, m_new, l_i * alpha + gl.sum(p, axis=1)


@gluon.jit
def _mainloop_step(
    query, state, positions, block, scale, number, tiles_done, rings, HALF: gl.constexpr, MASKED: gl.constexpr
):
    """Computes scores of `block`, the rings' `number`-th, and their softmax during p @ V of the block before."""
    acc, p, m_i, l_i = state
    _queries, keys, values, order = rings
    score_layout: gl.constexpr = p.type.layout
    stage, stage_before = number % STAGES, (number - 1) % STAGES
    phase_before = (number - 1) // STAGES & 1
    p_operand = gl.convert_layout(p.to(values.blocks.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    mbarrier.wait(keys.full.index(stage), number // STAGES & 1)
    # A tile has one step less than blocks.
    mbarrier.wait(order[HALF], (number - 1 - tiles_done) & 1 ^ (1 - HALF))
    no_scores = gl.zeros([HALF_ROWS, BLOCK], gl.float32, score_layout)
    scores = warpgroup_mma(query, keys.blocks.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(values.full.index(stage_before), phase_before)
    acc = warpgroup_mma(p_operand, values.blocks.index(stage_before), acc, is_async=True)
    mbarrier.arrive(order[1 - HALF])
    scores = mma_wait(1, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage))
    p, alpha, m_i, l_i = _online_softmax(scores, m_i, l_i, positions, block, scale, MASKED)
    # It is full already. The branch of this wait keeps the assembler from waiting for p @ V before the softmax.
    mbarrier.wait(values.full.index(stage_before), phase_before)
    acc = mma_wait(0, deps=[acc])
    mbarrier.arrive(values.empty.index(stage_before))
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return acc * alpha[:, None], p, m_i, l_i


@gluon.jit
def _consumer(out, sinks, scale, work, rings, OUT_PITCH: gl.constexpr, HAS_SINKS: gl.constexpr, HALF: gl.constexpr):
    """Runs a consumer warpgroup, which computes its half of every tile."""
    queries, keys, values, _order = rings
    head_dim: gl.constexpr = keys.blocks.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])
    query = queries.blocks.index(HALF)
    wave, tiles_done, number, sequence, tiles_before = 0, 0, 0, 0, 0
    while wave >= 0:
        wave, sequence, tiles_before, head, query_row, stop, first_position, end, blocks = _next_tile(
            wave, sequence, tiles_before, work
        )
        if blocks > 0:
            query_row += HALF * HALF_ROWS
            first_position += HALF * HALF_ROWS
            positions = first_position + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, score_layout))

            # The last block's scores: there is no p @ V yet.
            stage, phase = number % STAGES, number // STAGES & 1
            mbarrier.wait(queries.full, tiles_done & 1)
            mbarrier.wait(keys.full.index(stage), phase)
            no_scores = gl.zeros([HALF_ROWS, BLOCK], gl.float32, score_layout)
            scores = warpgroup_mma(query, keys.blocks.index(stage).permute((1, 0)), no_scores, use_acc=False)
            mbarrier.arrive(keys.empty.index(stage))
            m_i = gl.full([HALF_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
            l_i = gl.zeros([HALF_ROWS], gl.float32, gl.SliceLayout(1, score_layout))
            p, _alpha, m_i, l_i = _online_softmax(scores, m_i, l_i, positions, blocks - 1, scale, True)
            acc = gl.zeros([HALF_ROWS, head_dim], gl.float32, acc_layout)
            if blocks * BLOCK > end:
                # p is 0 behind a sequence's end, but 0 * NaN is NaN. The other warpgroup may clear the values as well.
                mbarrier.wait(values.full.index(stage), phase)
                tokens = (blocks - 1) * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, row_layout))
                block = values.blocks.index(stage)
                block.store(gl.where((tokens < end)[:, None], block.load(row_layout), 0.0))
                fence_async_shared()
                gl.thread_barrier()

            # Backwards: blocks that the diagonal crosses, then those that every row sees.
            masked = gl.maximum(1, blocks - (first_position + 1) // BLOCK)
            state = (acc, p, m_i, l_i)
            for done in range(1, masked):
                state = _mainloop_step(query, state, positions, blocks - 1 - done, scale, number + done, tiles_done,
                                       rings, HALF, True)  # fmt: skip
            for done in range(masked, blocks):
                state = _mainloop_step(query, state, positions, blocks - 1 - done, scale, number + done, tiles_done,
                                       rings, HALF, False)  # fmt: skip
            mbarrier.arrive(queries.empty)
            acc, p, m_i, l_i = state
            number += blocks
            tiles_done += 1

            # The first block's values.
            stage, phase = (number - 1) % STAGES, (number - 1) // STAGES & 1
            mbarrier.wait(values.full.index(stage), phase)
            p_operand = gl.convert_layout(p.to(values.blocks.dtype), gl.DotOperandLayout(0, acc_layout, 2))
            acc = warpgroup_mma(p_operand, values.blocks.index(stage), acc)
            mbarrier.arrive(values.empty.index(stage))
            if HAS_SINKS:  # as `sinks.add_sinks`: a logit without a value
                l_i += gl.exp2(gl.load(sinks + head).to(gl.float32) * LOG2E - m_i * scale)
            l_i = gl.convert_layout(l_i, gl.SliceLayout(1, acc_layout), assert_trivial=True)
            result = gl.convert_layout((acc * (1.0 / l_i)[:, None]).to(values.blocks.dtype), row_layout)
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
def _hopper_prefill_attention(q, pages, page_tables, query_starts, ends, sinks, out, table_stride, sequences, scale,
                              HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr,
                              ROWS_OF_PAGE: gl.constexpr, OUT_PITCH: gl.constexpr,
                              HAS_SINKS: gl.constexpr):  # fmt: skip
    """FlashAttention-3: persistent programs, each with one (tile, head) per wave."""
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
    work = _Tiles(query_starts, ends, sequences, HEADS)
    gl.warp_specialize(
        [
            (_consumer, (out, sinks, scale, work, rings, OUT_PITCH, HAS_SINKS, 0)),
            (_consumer, (out, sinks, scale, work, rings, OUT_PITCH, HAS_SINKS, 1)),
            (_producer, (q, pages, page_tables, table_stride, work, rings, GROUP, PAGE_SIZE, ROWS_OF_PAGE)),
        ],
        [4, 1],
        [240, 24],  # registers of a thread
    )


@functools.lru_cache(maxsize=1024)
def _descriptor(address: int, dtype: torch.dtype, rows: int, pitch: int, block_rows: int, width: int) -> Any:
    """Returns the TMA descriptor of blocks [block_rows, width] of `rows` rows with a stride of `pitch` elements."""
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
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Computes `prefill_attention.prefill_attention` for shapes that `attention_config.supports_hopper_fa3` accepts.

    It is launched with programmatic dependent launch and reads `rows` at once: the kernel right before it must not have
    written them.
    """
    tokens, heads, head_dim = q.shape
    pages, _, page_size, kv_heads, _ = pool.shape
    page_pitch, _, token_pitch, _, _ = pool.stride()
    rows_of_page = page_pitch // token_pitch  # of all layers
    kv_rows = (pages - 1) * rows_of_page + 2 * page_size
    sequences = rows.ends.shape[0]
    items = (tokens // ROWS.value + sequences) * heads  # at most: each sequence may end with a tile that is not full
    programs = min(items, config.programs)
    constants = (heads, heads // kv_heads, page_size, rows_of_page, out.stride(0), sinks is not None)
    arguments = (
        _descriptor(q.data_ptr(), q.dtype, tokens, q.stride(0), HALF_ROWS.value, head_dim),
        _descriptor(pool.data_ptr(), pool.dtype, kv_rows, token_pitch, BLOCK.value, head_dim),
        *(rows.page_tables, rows.query_starts, rows.ends, out if sinks is None else sinks, out),
        *(rows.page_tables.stride(0), sequences),
        scale * LOG2_E,
        *constants,
    )
    # Triton's search for the compiled kernel by its arguments takes twice as long as the rest of a launch.
    variant = (q.device, q.dtype, None if sinks is None else sinks.dtype, head_dim, constants)
    if variant in _COMPILED:
        _COMPILED[variant][(programs, 1, 1)](*arguments)
    else:
        _COMPILED[variant] = _hopper_prefill_attention[(programs,)](*arguments, num_warps=4, launch_pdl=True)


_COMPILED: dict[tuple[Any, ...], Any] = {}
