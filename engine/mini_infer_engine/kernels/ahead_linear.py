"""The product of few rows on Hopper, in Gluon: its weights are on their way before the kernel before it has ended.

Weights depend on nobody. So each program is launched while the kernel before still runs (programmatic dependent
launch), has the copy engine fill a ring of shared memory with weights, and only then waits for what that kernel
writes. Between two products memory thus stays busy; what is left of a boundary is the way of x to the matrix units.

Weights are the left operand, sixty-four of their rows at least; a gated product's tile is half gate, half up. Programs
are (block of columns, split of the width, block of tokens).

Every kernel between two that are launched ahead has to wait as well, in all its programs: then whoever waits knows
all kernels before the last one complete, too. What is read before the wait never changes.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.skinny_cut import AheadConfig
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

PANEL = gl.constexpr(64)
"""Of the width: 128 bytes, a row of shared memory as the copy engine lays it out for the matrix units."""


@gluon.jit
def _let_next_kernel_begin():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch_weights(weight, ring, full, stage, step, first_row, wanted, STAGE_BYTES: gl.constexpr):
    """One step's weights. The barrier expects x of this step, too."""
    panels: gl.constexpr = weight.block_shape[0]
    mbarrier.expect(full.index(stage), STAGE_BYTES, pred=wanted)
    place = [step * panels, 0, first_row, 0]
    tma.async_copy_global_to_shared(weight, place, full.index(stage), ring.index(stage), pred=wanted)


@gluon.jit
def _fetch_x(x, ring, full, stage, step, first_token, wanted):
    panels: gl.constexpr = x.block_shape[0]
    place = [step * panels, first_token, 0]
    tma.async_copy_global_to_shared(x, place, full.index(stage), ring.index(stage), pred=wanted)


@gluon.jit
def _halves(total, GATED: gl.constexpr, LAYOUT: gl.constexpr, BOTH_LAYOUT: gl.constexpr):
    """Sums as the end wants them: [columns, tokens] of the gate, or of all, and of up."""
    if GATED:
        both = gl.permute(gl.reshape(total, [2, total.shape[0] // 2, total.shape[1]]), (1, 2, 0))
        first, second = gl.split(gl.convert_layout(both, BOTH_LAYOUT))
        first = gl.convert_layout(first, LAYOUT)
        second = gl.convert_layout(second, LAYOUT)
    else:
        first = gl.convert_layout(total, LAYOUT)
        second = first
    return first, second


@gluon.jit
def _finish(total, total_up, scale, residual, before, added, norms, out, scaled, next_square_sums, block, n, t, inside, columns,
            squares_stride, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr,
            PARTS: gl.constexpr, NEXT_NORM: gl.constexpr, LAYOUT: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """From sums [columns, tokens] to what is stored."""
    if PARTS > 0:
        total = total * scale[None, :]
        total_up = total_up * scale[None, :]
    if BIAS:
        total += added.to(gl.float32)[:, None]
    if GATED:
        total = total / (1.0 + gl.exp(-total)) * total_up
    places = t.to(gl.int64)[None, :] * columns + n[:, None]
    if RESIDUAL:
        if not EARLY:
            before = gl.load(residual + places, mask=inside, other=0.0)
        total += before.to(gl.float32)
    result = total.to(out.dtype.element_ty)
    gl.store(out + places, result, mask=inside)
    if NEXT_NORM:
        rounded = gl.where(inside, result.to(gl.float32), 0.0)
        gl.store(scaled + places, (rounded * norms.to(gl.float32)[:, None]).to(out.dtype.element_ty), mask=inside)
        gl.store(next_square_sums + block * squares_stride + t, gl.sum(rounded * rounded, axis=0))


@gluon.jit(do_not_specialize=["rows", "steps", "steps_of_split", "parts"])
def _ahead_linear(weight, x, bias, residual, square_sums, next_norm, out, scaled, next_square_sums, partials, counters,
                  rows, columns, steps, steps_of_split, parts, squares_stride, inverse_width, eps,
                  BLOCK_W: gl.constexpr, BLOCK_T: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
                  SPLITS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr,
                  PARTS: gl.constexpr, NEXT_NORM: gl.constexpr, VECTOR: gl.constexpr, EARLY: gl.constexpr,
                  WARM: gl.constexpr, AT_ONCE: gl.constexpr):  # fmt: skip
    """Program (block of columns, split, block of tokens). The split that arrives last adds all sums and finishes."""
    if AT_ONCE:
        _let_next_kernel_begin()
    PIECES: gl.constexpr = 2 if GATED else 1
    BLOCK_N: gl.constexpr = BLOCK_W // PIECES
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_T, 16])
    LANES: gl.constexpr = BLOCK_N // VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    BOTH_LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR, 1, 2], [LANES, 32 // LANES, 1], [1, WARPS, 1], [2, 0, 1])
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    STAGE_BYTES: gl.constexpr = (BLOCK_W + BLOCK_T) * PANELS * PANEL * 2

    block = gl.program_id(0)
    split = gl.program_id(1)
    first_token = gl.program_id(2) * BLOCK_T
    begin = split * steps_of_split
    count = gl.minimum(steps - begin, steps_of_split)
    weight_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, PANELS, PIECES, BLOCK_N, PANEL], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES + WARM, PANELS, BLOCK_T, PANEL], x.layout)
    weights = weight_ring._reinterpret(weight.dtype, [STAGES * PANELS, BLOCK_W, PANEL], MATRIX)
    values = x_ring._reinterpret(x.dtype, [(STAGES + WARM) * PANELS, BLOCK_T, PANEL], MATRIX)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + WARM, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES + WARM):
        mbarrier.init(full.index(early), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for early in gl.static_range(STAGES):
        _fetch_weights(weight, weight_ring, full, early, begin + early, block * BLOCK_N, early < count, STAGE_BYTES)
    if WARM:  # a copy from beyond the edge, so that the descriptor of x is at hand when x is
        mbarrier.expect(full.index(STAGES), BLOCK_T * PANELS * PANEL * 2)
        _fetch_x(x, x_ring, full, STAGES, steps, 0, True)

    n = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    t = first_token + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, LAYOUT))
    inside = (n < columns)[:, None] & (t < rows)[None, :]
    added, norms, before, scale = n, n, n, t
    if BIAS:
        added = gl.load(bias + n, mask=n < columns, other=0.0)
    if NEXT_NORM:
        norms = gl.load(next_norm + n, mask=n < columns, other=0.0)

    _wait_for_kernel_before()
    if not AT_ONCE:
        _let_next_kernel_begin()
    for early in gl.static_range(STAGES):
        _fetch_x(x, x_ring, full, early, begin + early, first_token, early < count)
    residual_at = t.to(gl.int64)[None, :] * columns + n[:, None]
    if RESIDUAL and EARLY:  # what the end needs is asked for before the wait for x, where it fits the registers
        before = gl.load(residual + residual_at, mask=inside, other=0.0)
    if PARTS > 0:
        part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, SQUARES))
        token = first_token + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, SQUARES))
        squares_at = square_sums + part[:, None] * squares_stride + token[None, :]
        squares = gl.load(squares_at, mask=(part < parts)[:, None], other=0.0)
        scale = gl.rsqrt(gl.sum(squares, axis=0) * inverse_width + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, LAYOUT))

    total = gl.zeros([BLOCK_W, BLOCK_T], gl.float32, SUMS)
    for step in range(count):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        for panel in gl.static_range(PANELS):
            at = stage * PANELS + panel
            total = warpgroup_mma(weights.index(at), values.index(at).permute((1, 0)), total, is_async=True)
        total = mma_wait(PANELS, deps=[total])  # the steps before are done
        following = step - 1 + STAGES
        if (step > 0) & (following < count):
            emptied = (step - 1) % STAGES
            gl.thread_barrier()
            _fetch_weights(weight, weight_ring, full, emptied, begin + following, block * BLOCK_N, True, STAGE_BYTES)
            _fetch_x(x, x_ring, full, emptied, begin + following, first_token, True)
    total = mma_wait(0, deps=[total])
    if WARM:
        mbarrier.wait(full.index(STAGES), 0)

    if SPLITS == 1:
        first, second = _halves(total, GATED, LAYOUT, BOTH_LAYOUT)
        _finish(first, second, scale, residual, before, added, norms, out, scaled, next_square_sums, block, n, t, inside,
                columns, squares_stride, BIAS, RESIDUAL, GATED, PARTS, NEXT_NORM,
                LAYOUT, EARLY)  # fmt: skip
    else:
        tile = gl.program_id(2) * gl.num_programs(0) + block
        w = gl.arange(0, BLOCK_W, layout=gl.SliceLayout(1, SUMS))
        own = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, SUMS))
        sums = partials + (tile * SPLITS + split) * (BLOCK_W * BLOCK_T)
        gl.store(sums + own[None, :] * BLOCK_W + w[:, None], total)
        gl.thread_barrier()
        if gl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            first = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, LAYOUT)
            second = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, LAYOUT)
            theirs = partials + tile * (SPLITS * BLOCK_W * BLOCK_T)
            place = (t - first_token)[None, :] * BLOCK_W + (n - block * BLOCK_N)[:, None]
            # In the same order whoever is last, so that results repeat bit for bit.
            for other in gl.static_range(SPLITS):
                sums_at = theirs + other * (BLOCK_W * BLOCK_T) + place
                first += gl.load(sums_at, cache_modifier=".cg")
                if GATED:
                    second += gl.load(sums_at + BLOCK_N, cache_modifier=".cg")
            gl.store(counters + tile, 0)
            _finish(first, second, scale, residual, before, added, norms, out, scaled, next_square_sums, block, n, t, inside,
                    columns, squares_stride, BIAS, RESIDUAL, GATED, PARTS, NEXT_NORM,
                    LAYOUT, EARLY)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> Any:
    """How the copy engine reads blocks of a matrix seen as panels, their rows and PANEL of the width."""
    memory = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # a tensor would stay alive in the cache
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return TensorDescriptor(memory, list(shape), list(strides), list(block), layout)


def launch_ahead(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int, int],
    norm: tuple[int, int, float],
    config: AheadConfig,
    options: dict[str, Any],
) -> None:
    """Launch it for skinny_linear, from which it takes the kernel's tensors after `weight` and options as they are.

    x [rows, width]; sizes: rows, columns, width; norm: parts of the sums of squares, their pitch, epsilon.
    """
    rows, columns, width = sizes
    parts, squares_stride, eps = norm
    block_t = config.block_t
    panel, panels, pieces = PANEL.value, config.block_k // PANEL.value, 2 if options["GATED"] else 1
    assert width % panel == 0
    block_n = config.block_w // pieces
    blocks, steps, token_blocks = cdiv(columns, block_n), cdiv(width, config.block_k), cdiv(rows, block_t)
    steps_of_split = cdiv(steps, min(config.splits, steps))
    splits = cdiv(steps, steps_of_split)
    tiles = blocks * token_blocks
    assert splits == 1 or tiles <= COUNTERS
    workspace = Workspace.of(x.device, partials=tiles * splits * config.block_w * block_t if splits > 1 else 0)
    _ahead_linear[(blocks, splits, token_blocks)](
        _descriptor(
            weight.data_ptr(),
            weight.dtype,
            (width // panel, pieces, columns, panel),
            (panel, columns * weight.stride(0), weight.stride(0), 1),
            (panels, pieces, block_n, panel),
        ),
        _descriptor(
            x.data_ptr(), x.dtype, (width // panel, rows, panel), (panel, x.stride(0), 1), (panels, block_t, panel)
        ),
        *ends,
        workspace.partials,
        workspace.counters,
        rows,
        columns,
        steps,
        steps_of_split,
        parts,
        squares_stride,
        1.0 / width,
        eps,
        BLOCK_W=config.block_w,
        BLOCK_T=block_t,
        PANELS=panels,
        STAGES=min(config.stages, max(2, steps_of_split)),
        SPLITS=splits,
        VECTOR=max(1, min(8, block_n * block_t // (32 * config.warps))),
        EARLY=block_t <= 32,
        WARM=config.warm,
        AT_ONCE=config.at_once,
        num_warps=config.warps,
        launch_pdl=config.ahead,
        **options,
    )
