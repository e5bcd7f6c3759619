"""Split-K GEMM with programmatic dependent launch (CUDA C++ Programming Guide) for M <= 64 on Hopper, in Gluon.

Weights do not depend on the kernel before. So a program begins while that kernel still runs, has TMA fill a ring of
shared memory with weights, and only then waits for what that kernel writes. Memory stays busy between two GEMMs, and a
launch costs next to nothing: docs/adr/0012. (GEMMs of a decode step of Qwen3-0.6B on an H200: 486 us where they took
707.)

Weights are the left operand of wgmma, with 64 or 128 of their rows in a tile; a gated GEMM's tile is half gate, half
up. Rows of x, at least eight, are the instruction's N, so that few of them cost little. Programs are (tile of N, split
of K). Quantised weights (`quantized_weight`) stay packed in the ring and are widened to bf16 in registers, from which
wgmma reads its left operand. A row's scale multiplies at the end, a group's the sum of its 128 products.

Why it is safe. A kernel launched this way waits, in every program and before it reads or writes anything but weights,
until the kernel before it has ended, all writes done. It ends after its own wait, so a kernel that waits for it knows
that all kernels before it have ended, too; one launched as usual waits for the one before in any case. Weights, biases
and norms' weights are read before the wait: they must not be written by the kernel right before, nor while that runs.
All kernels of this package that are launched this way obey this rule. decode_attention and hopper_decode_attention read
their plan and page tables before the wait, too, from the second layer on: the kernel that makes the plan is launched as
usual before the first layer, and so has ended before anything of the second one begins.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mini_infer_engine.kernels.gemm.gemm_config import PdlGemmConfig, pdl_block_m
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP, QuantizedWeight
from mini_infer_engine.kernels.gemm.widening import (
    NIBBLES,
    in_columns,
    offsets_of,
    scale_of,
    unit_of,
    widened_bytes,
)
from mini_infer_engine.kernels.pdl import grid_dependency_wait, launch_dependents
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

PANEL = gl.constexpr(64)
"""Columns of K in a panel: 128 bytes of 16-bit values, a row of the swizzled layout that TMA writes and wgmma reads."""
FEWEST_COLUMNS = gl.constexpr(8)
"""N of the narrowest wgmma: rows of x, or of several panels of it."""
SCALES_GROUPS = gl.constexpr(4)
"""Groups whose scales are copied at a time: a power of two, so small that few are copied in excess."""


@gluon.jit
def _fetch_weights(weight, ring, full, stage, step, first_row, pred, STAGE_BYTES: gl.constexpr):
    """Begins the TMA copy of one step's weights. The barrier expects x of this step, too."""
    panels: gl.constexpr = weight.block_shape[0]
    mbarrier.expect(full.index(stage), STAGE_BYTES, pred=pred)
    coordinates = [step * panels, 0, first_row, 0]
    tma.async_copy_global_to_shared(weight, coordinates, full.index(stage), ring.index(stage), pred=pred)


@gluon.jit
def _fetch_scales(scales, kept, ready, first_group, group_count, first_row, N, PIECES: gl.constexpr,
                  WIDE: gl.constexpr):  # fmt: skip
    """Begins to copy all groups' scales of a tile's split into shared memory [groups, rows of the tile].

    WIDE: by TMA, SCALES_GROUPS at a time.
    """
    block_w: gl.constexpr = kept.shape[1]
    block_n: gl.constexpr = block_w // PIECES
    if WIDE:
        copies: gl.constexpr = kept.shape[0] // SCALES_GROUPS
        boxes = kept._reinterpret(kept.dtype, [copies, SCALES_GROUPS, PIECES, block_n], scales.layout)
        mbarrier.expect(ready.index(0), kept.shape[0] * block_w * 4)
        for copy in gl.static_range(copies):
            coordinates = [first_group + copy * SCALES_GROUPS, 0, first_row]
            tma.async_copy_global_to_shared(scales, coordinates, ready.index(0), boxes.index(copy))
    else:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        row = gl.arange(0, block_w, layout=layout)
        column = first_row + row % block_n
        sources = scales + first_group * (N * PIECES) + row // block_n * N + column
        for group in range(group_count):
            pointers = sources + group * (N * PIECES)
            async_copy.async_copy_global_to_shared(kept.index(group), pointers, mask=column < N)
        async_copy.commit_group()


@gluon.constexpr_function
def _panel_layout(rows, warps, width):
    """Returns a layout in which a thread has, of every 64 bytes, 16 of each row that wgmma expects from it."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], *([[0, 64]] if width == 128 else []), [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    if rows == 64:
        return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, width])
    if warps == 4:
        return gl.DistributedLinearLayout([*registers, [64, 0]], lanes, [[16, 0], [32, 0]], [], [rows, width])
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [rows, width])


@gluon.jit
def _loaded(panels, index, half: gl.constexpr):
    """Loads 64 bytes of each row of a tile: a panel, or half of one of 128 bytes."""
    rows: gl.constexpr = panels.shape[1]
    width: gl.constexpr = panels.shape[2]
    values = panels.index(index).load(_panel_layout(rows, gl.num_warps(), width))
    if width == 128:
        both = gl.split(gl.permute(gl.reshape(values, [rows, 2, 64]), (0, 2, 1)))
        values = gl.convert_layout(both[half], _panel_layout(rows, gl.num_warps(), 64), assert_trivial=True)
    return values


@gluon.jit
def _widened_nibbles(values, parameters):
    """Widens 128 columns of 4-bit weights, less zero points, to two halves [rows, 64] bf16 as wgmma reads them."""
    layout: gl.constexpr = _panel_layout(values.shape[0], gl.num_warps(), 64)
    low, high = gl.inline_asm_elementwise(
        NIBBLES,
        "=&r,=&r,=&r,=&r,r,r,r",
        [values, offsets_of(parameters.load(gl.SliceLayout(1, layout)))[:, None]],
        (gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return in_columns(low, high)


@gluon.jit
def _widened_group(weight_panels, scales, stage, index, group, GROUPS: gl.constexpr, OPERAND: gl.constexpr):
    """Widens 128 of a step's GROUPS * 128 columns to two halves [rows, 64]."""
    panels: gl.constexpr = GROUPS * 2 // (weight_panels.shape[2] // 64)  # of a step, where a column is a byte
    if weight_panels.dtype == gl.uint8:
        first_panel = stage * (panels // 2) + index * (panels // 2) // GROUPS
        half: gl.constexpr = index % 2
        first, second = _widened_nibbles(_loaded(weight_panels, first_panel, half), scales.index(group))
    elif weight_panels.shape[2] == 64:
        first = widened_bytes(_loaded(weight_panels, stage * panels + index * 2, 0))
        second = widened_bytes(_loaded(weight_panels, stage * panels + index * 2 + 1, 0))
    else:
        first = widened_bytes(_loaded(weight_panels, stage * panels + index, 0))
        second = widened_bytes(_loaded(weight_panels, stage * panels + index, 1))
    first = gl.convert_layout(first, OPERAND, assert_trivial=True)
    second = gl.convert_layout(second, OPERAND, assert_trivial=True)
    return first, second


@gluon.jit
def _multiply(weight_panel, x_tile, accs, at: gl.constexpr):
    """Has the tensor cores add a product to one of the accumulators, and returns all of them."""
    acc = warpgroup_mma(weight_panel, x_tile, accs[at], is_async=True)
    return accs[:at] + (acc,) + accs[at + 1 :]  # noqa: RUF005  # Triton's tuples have no stars


@gluon.jit
def _multiply_quantized(accs, weight_panels, x_tiles, scales, stage, first_group, GROUPS: gl.constexpr,
                        X_TILES: gl.constexpr, PANELS_A_TILE: gl.constexpr, GROUPED: gl.constexpr):  # fmt: skip
    """Adds one step's products of quantised weights and x to the accumulators, times scales of groups if there are any.

    One group is widened while the one before is multiplied.
    """
    acc_layout: gl.constexpr = accs[0].type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    zeros = gl.zeros_like(accs[0])
    # Products of the group before, which run while this one is widened, and its scale.
    earlier_first, earlier_second, earlier_scale = zeros, zeros, zeros
    for index in gl.static_range(GROUPS):
        group = first_group + index
        first, second = _widened_group(weight_panels, scales, stage, index, group, GROUPS, operand)
        x_first = x_tiles.index(stage * X_TILES + index * 2 // PANELS_A_TILE).permute((1, 0))
        x_second = x_tiles.index(stage * X_TILES + (index * 2 + 1) // PANELS_A_TILE).permute((1, 0))
        if GROUPED:
            scale = scale_of(scales.index(group).load(gl.SliceLayout(1, acc_layout))) * unit_of(weight_panels.dtype)
            product = warpgroup_mma(first, x_first, zeros, is_async=True)
            if PANELS_A_TILE == 1:
                product_second = warpgroup_mma(second, x_second, product, is_async=True)
            else:
                product_second = warpgroup_mma(second, x_second, zeros, is_async=True)
            if index > 0:
                accs = _plus(accs, earlier_first, earlier_second, earlier_scale, (index - 1) * 2, 2, PANELS_A_TILE)
            earlier_first, earlier_second, earlier_scale = product, product_second, scale
        else:
            accs = _multiply(first, x_first, accs, index * 2 % PANELS_A_TILE)
            accs = _multiply(second, x_second, accs, (index * 2 + 1) % PANELS_A_TILE)
    if GROUPED:
        accs = _plus(accs, earlier_first, earlier_second, earlier_scale, (GROUPS - 1) * 2, 0, PANELS_A_TILE)
    else:
        accs = _waited(accs, 0)
    return accs


@gluon.jit
def _waited(accs, outstanding: gl.constexpr):
    """Returns all accumulators once at most this many products are outstanding."""
    found = mma_wait(outstanding, deps=accs)
    if len(accs) == 1:
        found = (found,)
    return found


@gluon.jit
def _plus(accs, first, second, scale, panel: gl.constexpr, outstanding: gl.constexpr, PANELS_A_TILE: gl.constexpr):
    """Adds the products of a group's panels, times its scale, once at most this many products are outstanding."""
    at: gl.constexpr = panel % PANELS_A_TILE
    if PANELS_A_TILE == 1:
        accs = (accs[0] + mma_wait(outstanding, deps=[second]) * scale[:, None],)
    else:
        first, second = mma_wait(outstanding, deps=[first, second])
        acc, next_acc = accs[at] + first * scale[:, None], accs[at + 1] + second * scale[:, None]
        accs = accs[:at] + (acc, next_acc) + accs[at + 2 :]  # noqa: RUF005  # as above
    return accs


@gluon.jit
def _sum_of_panels(accs, TOKENS: gl.constexpr):
    """Sums accumulators, each of which has one panel's columns, into [rows, N] with all tokens repeated."""
    panels: gl.constexpr = len(accs)
    if panels == 1:
        total = accs[0]
    else:
        layout: gl.constexpr = accs[0].type.layout
        rows: gl.constexpr = accs[0].shape[0]
        columns: gl.constexpr = accs[0].shape[1]
        column = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))[None, :]
        total = gl.zeros_like(accs[0])
        for panel in gl.static_range(panels):
            total += gl.where(column // TOKENS == panel, accs[panel], 0.0)
        tokens = gl.sum(gl.reshape(total, [rows, columns // TOKENS, TOKENS]), axis=1)
        repeated = gl.expand_dims(tokens, 1) + gl.zeros_like(gl.reshape(total, [rows, columns // TOKENS, TOKENS]))
        total = gl.convert_layout(gl.reshape(repeated, [rows, columns]), layout)
    return total


@gluon.jit
def _fetch_x(x, ring, full, stage, step, panels: gl.constexpr, pred):
    coordinates = [step * panels, 0, 0]
    tma.async_copy_global_to_shared(x, coordinates, full.index(stage), ring.index(stage), pred=pred)


@gluon.jit
def _gate_and_up(acc, GATED: gl.constexpr, LAYOUT: gl.constexpr, BOTH_LAYOUT: gl.constexpr):
    """Converts the accumulator to the epilogue's layout: [N, M] of the gate, or of everything, and of up."""
    if GATED:
        both = gl.permute(gl.reshape(acc, [2, acc.shape[0] // 2, acc.shape[1]]), (1, 2, 0))
        first, second = gl.split(gl.convert_layout(both, BOTH_LAYOUT))
        first = gl.convert_layout(first, LAYOUT)
        second = gl.convert_layout(second, LAYOUT)
    else:
        first = gl.convert_layout(acc, LAYOUT)
        second = first
    return first, second


@gluon.jit
def _store_partials(acc, partials, LAYOUT: gl.constexpr):
    """Stores partial sums of a split, for the split that arrives last."""
    offs_w = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    offs_t = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    gl.store(partials + offs_t[None, :] * acc.shape[0] + offs_w[:, None], acc)


@gluon.jit
def _sum_partials(tile_partials, offs_w, offs_t, BLOCK_W: gl.constexpr, BLOCK_T: gl.constexpr, SPLITS: gl.constexpr,
                  GATED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Adds all splits' partial sums in the form of `_gate_and_up`, in a fixed order, so that results are reproducible
    bitwise.
    """
    first = gl.zeros([offs_w.shape[0], BLOCK_T], gl.float32, LAYOUT)
    second = gl.zeros([offs_w.shape[0], BLOCK_T], gl.float32, LAYOUT)
    offsets = offs_t[None, :] * BLOCK_W + offs_w[:, None]
    for split in gl.static_range(SPLITS):
        split_partials = tile_partials + split * (BLOCK_W * BLOCK_T) + offsets
        first += gl.load(split_partials, cache_modifier=".cg")
        if GATED:
            second += gl.load(split_partials + offs_w.shape[0], cache_modifier=".cg")
    return first, second


@gluon.jit(do_not_specialize=["M", "k_steps", "steps_of_split", "parts"])
def _pdl_gemm(weight, x, scales, bias, residual, square_sums, next_norm, out, scaled, next_square_sums, partials,
                  counters, M, N, k_steps, steps_of_split, parts, inverse_k, eps,
                  STAGES: gl.constexpr, SPLITS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
                  GATED: gl.constexpr, PARTS: gl.constexpr, NEXT_NORM: gl.constexpr, ROW_SCALES: gl.constexpr,
                  KEPT_GROUPS: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Split-K with PDL: one program per (tile of N, split of K).

    The split that arrives last adds all sums and runs the epilogue.
    """
    launch_dependents()
    warps: gl.constexpr = gl.num_warps()
    panels: gl.constexpr = weight.block_shape[0]
    pieces: gl.constexpr = weight.block_shape[1]
    block_n: gl.constexpr = weight.block_shape[2]
    width: gl.constexpr = weight.block_shape[3]
    block_w: gl.constexpr = pieces * block_n
    tokens: gl.constexpr = x.block_shape[1]
    block_t: gl.constexpr = max(tokens, FEWEST_COLUMNS.value)
    squares_pitch: gl.constexpr = block_t if block_t > 16 else 16  # portable_block_m
    is_quantized: gl.constexpr = weight.dtype.primitive_bitwidth == 8
    x_panels: gl.constexpr = panels * width * (2 if weight.dtype == gl.uint8 else 1) // PANEL
    panels_a_tile: gl.constexpr = block_t // tokens
    x_tile_count: gl.constexpr = x.block_shape[0] // panels_a_tile
    panel_bytes: gl.constexpr = width * weight.dtype.primitive_bitwidth // 8
    stage_bytes: gl.constexpr = panels * block_w * panel_bytes + x_tile_count * block_t * PANEL * 2
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_t, 16])
    vector: gl.constexpr = 8 if block_n * block_t >= 1024 else block_n * block_t // 128
    lanes: gl.constexpr = block_n // vector
    layout: gl.constexpr = gl.BlockedLayout([vector, 1], [lanes, 32 // lanes], [1, warps], [0, 1])
    both_layout: gl.constexpr = gl.BlockedLayout([vector, 1, 2], [lanes, 32 // lanes, 1], [1, warps, 1], [2, 0, 1])
    squares_layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, warps], [1, 0])
    matrix_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout(panel_bytes, weight.dtype.primitive_bitwidth, 2)

    tile_n = gl.program_id(0)
    split = gl.program_id(1)
    first_step = split * steps_of_split
    step_count = gl.minimum(k_steps - first_step, steps_of_split)
    weight_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, panels, pieces, block_n, width], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_shape[0], tokens, PANEL], x.layout)
    weight_panels = weight_ring._reinterpret(weight.dtype, [STAGES * panels, block_w, width], weight_layout)
    x_tiles = x_ring._reinterpret(x.dtype, [STAGES * x_tile_count, block_t, PANEL], matrix_layout)
    group_scales = x_tiles  # where groups have no scales, nothing reads them
    if KEPT_GROUPS:
        kept_type: gl.constexpr = scales.dtype if WIDE else scales.dtype.element_ty
        kept_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        group_scales = gl.allocate_shared_memory(kept_type, [KEPT_GROUPS, block_w], kept_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scales_ready = full
    if KEPT_GROUPS and WIDE:
        scales_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(scales_ready.index(0), count=1)
    for stage_early in gl.static_range(STAGES):
        mbarrier.init(full.index(stage_early), count=1)
    fence_async_shared()
    gl.thread_barrier()

    # Before the wait for the kernel before: weights alone.
    for stage_early in gl.static_range(STAGES):
        _fetch_weights(
            weight,
            weight_ring,
            full,
            stage_early,
            first_step + stage_early,
            tile_n * block_n,
            stage_early < step_count,
            stage_bytes,
        )
    groups_a_step: gl.constexpr = x_panels // 2
    if KEPT_GROUPS:
        _fetch_scales(
            scales,
            group_scales,
            scales_ready,
            first_step * groups_a_step,
            step_count * groups_a_step,
            tile_n * block_n,
            N,
            pieces,
            WIDE,
        )
    offs_w = gl.arange(0, block_n, layout=gl.SliceLayout(1, layout))
    offs_n = tile_n * block_n + offs_w
    offs_t = gl.arange(0, block_t, layout=gl.SliceLayout(0, layout))
    mask = (offs_n < N)[:, None] & (offs_t < M)[None, :]
    bias_values, norms, residual_values, scale = offs_n, offs_n, offs_n, offs_t
    row_scales, up_scales = offs_n, offs_n
    if ROW_SCALES:
        row_scales = gl.load(scales + offs_n, mask=offs_n < N, other=0.0)
        if GATED:
            up_scales = gl.load(scales + N + offs_n, mask=offs_n < N, other=0.0)
    if BIAS:
        bias_values = gl.load(bias + offs_n, mask=offs_n < N, other=0.0)
    if NEXT_NORM:
        norms = gl.load(next_norm + offs_n, mask=offs_n < N, other=0.0)

    grid_dependency_wait()
    for stage_early in gl.static_range(STAGES):
        _fetch_x(x, x_ring, full, stage_early, first_step + stage_early, x_panels, stage_early < step_count)
    out_offsets = offs_t[None, :] * N + offs_n[:, None]
    if RESIDUAL and block_t <= 32:  # loaded before the wait for x, where it fits the registers
        residual_values = gl.load(residual + out_offsets, mask=mask, other=0.0)
    if PARTS > 0:
        part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, squares_layout))
        token = gl.arange(0, block_t, layout=gl.SliceLayout(0, squares_layout))
        squares_at = square_sums + part[:, None] * squares_pitch + token[None, :]
        squares = gl.load(squares_at, mask=(part < parts)[:, None], other=0.0)
        scale = gl.rsqrt(gl.sum(squares, axis=0) * inverse_k + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, layout))

    if KEPT_GROUPS:
        if WIDE:
            mbarrier.wait(scales_ready.index(0), 0)
        else:
            async_copy.wait_group(0)
            gl.thread_barrier()
    accs = (gl.zeros([block_w, block_t], gl.float32, acc_layout),) * min(panels_a_tile, x_panels)
    for step in range(step_count):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if is_quantized:
            accs = _multiply_quantized(
                accs,
                weight_panels,
                x_tiles,
                group_scales,
                stage,
                step * groups_a_step,
                groups_a_step,
                x_tile_count,
                panels_a_tile,
                KEPT_GROUPS > 0,
            )
        else:
            for panel in gl.static_range(panels):
                x_tile = x_tiles.index(stage * x_tile_count + panel // panels_a_tile).permute((1, 0))
                accs = _multiply(weight_panels.index(stage * panels + panel), x_tile, accs, panel % panels_a_tile)
            accs = _waited(accs, panels)  # the steps before are done
        following = step - 1 + STAGES
        if (step > 0) & (following < step_count):
            emptied = (step - 1) % STAGES
            gl.thread_barrier()
            _fetch_weights(
                weight, weight_ring, full, emptied, first_step + following, tile_n * block_n, True, stage_bytes
            )
            _fetch_x(x, x_ring, full, emptied, first_step + following, x_panels, True)
    if not is_quantized:
        accs = _waited(accs, 0)
    acc = _sum_of_panels(accs, tokens)

    is_last = True
    if SPLITS == 1:
        first, second = _gate_and_up(acc, GATED, layout, both_layout)
    else:
        tile_partials = partials + tile_n * (SPLITS * block_w * block_t)
        _store_partials(acc, tile_partials + split * (block_w * block_t), acc_layout)
        gl.thread_barrier()
        is_last = gl.atomic_add(counters + tile_n, 1, sem="acq_rel") == SPLITS - 1
        first = gl.zeros([block_n, block_t], gl.float32, layout)
        second = first
        if is_last:
            first, second = _sum_partials(tile_partials, offs_w, offs_t, block_w, block_t, SPLITS, GATED, layout)
            gl.store(counters + tile_n, 0)
    if is_last:
        if ROW_SCALES:
            first = first * unit_of(weight.dtype) * row_scales[:, None]
            second = second * unit_of(weight.dtype) * up_scales[:, None]
        if PARTS > 0:
            first = first * scale[None, :]
            second = second * scale[None, :]
        if BIAS:
            first += bias_values.to(gl.float32)[:, None]
        if GATED:
            first = first / (1.0 + gl.exp(-first)) * second
        if RESIDUAL:
            if block_t <= 32:
                first += residual_values.to(gl.float32)
            else:
                first += gl.load(residual + out_offsets, mask=mask, other=0.0).to(gl.float32)
        result = first.to(out.dtype.element_ty)
        gl.store(out + out_offsets, result, mask=mask)
        if NEXT_NORM:
            rounded = gl.where(mask, result.to(gl.float32), 0.0)
            gl.store(
                scaled + out_offsets, (rounded * norms.to(gl.float32)[:, None]).to(out.dtype.element_ty), mask=mask
            )
            gl.store(next_square_sums + tile_n * squares_pitch + offs_t, gl.sum(rounded * rounded, axis=0))


@functools.lru_cache(maxsize=4096)
def _descriptor(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> Any:
    """Returns the TMA descriptor of a matrix as panels, their rows, and neighbouring values of a row: 128 bytes, or 64.

    Scales of 32 bits are not swizzled, because wgmma does not read them.
    """
    memory = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # a tensor would stay alive in the cache
    bits = dtype.itemsize * 8
    swizzle = block[-1] * dtype.itemsize if bits < 32 else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))
    return TensorDescriptor(memory, list(shape), list(strides), list(block), layout)


def launch_pdl_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    epilogue: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int, int],
    norm: tuple[int, float],
    config: PdlGemmConfig,
    options: dict[str, Any],
    workspace: Workspace,
) -> None:
    """Launches the kernel with `launch_stream_k_gemm`'s arguments, for operands that `are_tma_operands` accepts.

    The device must have `supports_gluon`.
    """
    m, n, k = sizes
    parts, eps = norm
    values, scales, bits = (
        (weight.values, weight.scales, weight.bits) if isinstance(weight, QuantizedWeight) else (weight, None, 16)
    )
    pieces, pitch, block_t = 2 if options["GATED"] else 1, values.stride(0), pdl_block_m(m)
    wide = config.wide and bits < 16
    x_tokens = next_power_of_2(m) if wide else block_t
    tiles, k_steps = cdiv(n, config.block_n), cdiv(k, config.block_k)
    steps_of_split = cdiv(k_steps, min(config.splits, k_steps))
    splits = cdiv(k_steps, steps_of_split)
    assert splits == 1 or tiles <= COUNTERS
    partial_floats = tiles * splits * pieces * config.block_n * block_t if splits > 1 else 0
    # Of the tensor's values: what a step has of a row, and a panel, 128 bytes if it can be.
    step_width, width = config.block_k * bits // (8 * values.dtype.itemsize), PANEL.value
    if wide and step_width >= 128 and not values.shape[1] % 128:
        width = 128
    weight_block = (step_width // width, pieces, config.block_n, width)
    weight_shape, weight_strides = (values.shape[1] // width, pieces, n, width), (width, n * pitch, pitch, 1)
    x_panels = config.block_k // PANEL.value
    x_block = (max(x_panels, FEWEST_COLUMNS.value // x_tokens), x_tokens, PANEL.value)
    x_shape, x_strides = (cdiv(k, PANEL.value), m, PANEL.value), (PANEL.value, x.stride(0), 1)
    kept_groups, kept_scales = 0, scales
    if isinstance(weight, QuantizedWeight) and weight.is_grouped:
        groups = weight.scales.shape[0]
        assert groups * GROUP == k_steps * config.block_k, "the last step has groups without scales"
        kept_groups = steps_of_split * config.block_k // GROUP
        if wide:
            kept_groups = cdiv(kept_groups, SCALES_GROUPS.value) * SCALES_GROUPS.value
            box = (SCALES_GROUPS.value, pieces, config.block_n)
            memory = weight.scales
            kept_scales = _descriptor(memory.data_ptr(), memory.dtype, (groups, pieces, n), (pieces * n, n, 1), box)
    _pdl_gemm[(tiles, splits)](
        _descriptor(values.data_ptr(), values.dtype, weight_shape, weight_strides, weight_block),
        _descriptor(x.data_ptr(), x.dtype, x_shape, x_strides, x_block),
        kept_scales,
        *epilogue,
        workspace.partials(partial_floats),
        workspace.counters,
        m,
        n,
        k_steps,
        steps_of_split,
        parts,
        1.0 / k,
        eps,
        STAGES=config.stages,
        SPLITS=splits,
        ROW_SCALES=scales is not None and not kept_groups,
        KEPT_GROUPS=kept_groups,
        WIDE=wide,
        num_warps=config.warps,
        launch_pdl=True,
        **options | {"PARTS": max(32, options["PARTS"]) if parts else 0},
    )
