"""The product of few rows on Hopper, in Gluon: its weights are on their way before the kernel before it has ended.

Weights depend on nobody. So a program begins while the kernel before still runs (programmatic dependent launch: CUDA
C++ Programming Guide), has the copy engine fill a ring of shared memory with weights, and only then waits for what
that kernel writes. Memory stays busy between two products, and a launch costs next to nothing: docs/adr/0012.
(Qwen3-0.6B, a decode step's products, H200: 486 us where they took 707.)

Weights are the left operand, 64 or 128 of their rows; a gated product's tile is half gate, half up. Rows of x, at least
eight, are the instruction's columns, so few of them cost little. Programs are (block of columns, split of the width).

Why it is safe. A kernel that is launched ahead waits, in every program and before it reads or writes anything but
weights, until the kernel before it has ended, all writes done. It ends after its own wait, so whoever waits for it
knows that all kernels before it have ended, too; one launched as usual waits for the one before in any case. Weights,
biases and norms' weights are read before the wait: they must not be written by the kernel right before, nor while
that runs. Whatever is launched ahead in this package keeps to this: here and decode_attention.
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

from mini_infer_engine.kernels.gemm.gemm_config import PdlGemmConfig, pdl_block_m
from mini_infer_engine.kernels.pdl import grid_dependency_wait, launch_dependents
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

PANEL = gl.constexpr(64)
"""Of the width: 128 bytes, a row of shared memory as the copy engine lays it out for the matrix units."""
WARPS = gl.constexpr(4)


@gluon.jit
def _fetch_weights(weight, ring, full, stage, step, first_row, wanted, STAGE_BYTES: gl.constexpr):
    """One step's weights. The barrier expects x of this step, too."""
    panels: gl.constexpr = weight.block_shape[0]
    mbarrier.expect(full.index(stage), STAGE_BYTES, pred=wanted)
    place = [step * panels, 0, first_row, 0]
    tma.async_copy_global_to_shared(weight, place, full.index(stage), ring.index(stage), pred=wanted)


@gluon.jit
def _fetch_x(x, ring, full, stage, step, wanted):
    panels: gl.constexpr = x.block_shape[0]
    place = [step * panels, 0, 0]
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
def _leave_sums(total, sums, SUMS: gl.constexpr):
    """A split's sums, to whoever arrives last."""
    w = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, SUMS))
    t = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, SUMS))
    gl.store(sums + t[None, :] * total.shape[0] + w[:, None], total)


@gluon.jit
def _add_splits(sums, w, t, BLOCK_W: gl.constexpr, BLOCK_T: gl.constexpr, SPLITS: gl.constexpr, GATED: gl.constexpr,
                LAYOUT: gl.constexpr):  # fmt: skip
    """What all splits have left, as of `_halves`; in one order whoever is last, so that results repeat bit for bit."""
    first = gl.zeros([w.shape[0], BLOCK_T], gl.float32, LAYOUT)
    second = gl.zeros([w.shape[0], BLOCK_T], gl.float32, LAYOUT)
    place = t[None, :] * BLOCK_W + w[:, None]
    for split in gl.static_range(SPLITS):
        sums_of_split = sums + split * (BLOCK_W * BLOCK_T) + place
        first += gl.load(sums_of_split, cache_modifier=".cg")
        if GATED:
            second += gl.load(sums_of_split + w.shape[0], cache_modifier=".cg")
    return first, second


@gluon.jit(do_not_specialize=["rows", "steps", "steps_of_split", "parts"])
def _ahead_linear(weight, x, bias, residual, square_sums, next_norm, out, scaled, next_square_sums, partials, counters,
                  rows, columns, steps, steps_of_split, parts, inverse_width, eps,
                  STAGES: gl.constexpr, SPLITS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
                  GATED: gl.constexpr, PARTS: gl.constexpr, NEXT_NORM: gl.constexpr):  # fmt: skip
    """Program (block of columns, split). The split that arrives last adds all sums and finishes."""
    launch_dependents()
    panels: gl.constexpr = weight.block_shape[0]
    pieces: gl.constexpr = weight.block_shape[1]
    block_n: gl.constexpr = weight.block_shape[2]
    block_w: gl.constexpr = pieces * block_n
    block_t: gl.constexpr = x.block_shape[1]
    squares_pitch: gl.constexpr = block_t if block_t > 16 else 16  # portable_block_m
    stage_bytes: gl.constexpr = (block_w + block_t) * panels * PANEL * 2
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, block_t, 16])
    vector: gl.constexpr = 8 if block_n * block_t >= 1024 else block_n * block_t // 128
    lanes: gl.constexpr = block_n // vector
    layout: gl.constexpr = gl.BlockedLayout([vector, 1], [lanes, 32 // lanes], [1, WARPS], [0, 1])
    both_layout: gl.constexpr = gl.BlockedLayout([vector, 1, 2], [lanes, 32 // lanes, 1], [1, WARPS, 1], [2, 0, 1])
    squares_layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0])
    matrix_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    block = gl.program_id(0)
    split = gl.program_id(1)
    begin = split * steps_of_split
    count = gl.minimum(steps - begin, steps_of_split)
    weight_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, panels, pieces, block_n, PANEL], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, panels, block_t, PANEL], x.layout)
    weights = weight_ring._reinterpret(weight.dtype, [STAGES * panels, block_w, PANEL], matrix_layout)
    values = x_ring._reinterpret(x.dtype, [STAGES * panels, block_t, PANEL], matrix_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(full.index(early), count=1)
    fence_async_shared()
    gl.thread_barrier()

    # Before the wait: weights alone.
    for early in gl.static_range(STAGES):
        _fetch_weights(weight, weight_ring, full, early, begin + early, block * block_n, early < count, stage_bytes)
    w = gl.arange(0, block_n, layout=gl.SliceLayout(1, layout))
    n = block * block_n + w
    t = gl.arange(0, block_t, layout=gl.SliceLayout(0, layout))
    inside = (n < columns)[:, None] & (t < rows)[None, :]
    added, norms, before, scale = n, n, n, t
    if BIAS:
        added = gl.load(bias + n, mask=n < columns, other=0.0)
    if NEXT_NORM:
        norms = gl.load(next_norm + n, mask=n < columns, other=0.0)

    grid_dependency_wait()
    for early in gl.static_range(STAGES):
        _fetch_x(x, x_ring, full, early, begin + early, early < count)
    places = t[None, :] * columns + n[:, None]
    if RESIDUAL and block_t <= 32:  # asked for before the wait for x, where it fits the registers
        before = gl.load(residual + places, mask=inside, other=0.0)
    if PARTS > 0:
        part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, squares_layout))
        token = gl.arange(0, block_t, layout=gl.SliceLayout(0, squares_layout))
        squares_at = square_sums + part[:, None] * squares_pitch + token[None, :]
        squares = gl.load(squares_at, mask=(part < parts)[:, None], other=0.0)
        scale = gl.rsqrt(gl.sum(squares, axis=0) * inverse_width + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, layout))

    total = gl.zeros([block_w, block_t], gl.float32, sums_layout)
    for step in range(count):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        for panel in gl.static_range(panels):
            at = stage * panels + panel
            total = warpgroup_mma(weights.index(at), values.index(at).permute((1, 0)), total, is_async=True)
        total = mma_wait(panels, deps=[total])  # the steps before are done
        following = step - 1 + STAGES
        if (step > 0) & (following < count):
            emptied = (step - 1) % STAGES
            gl.thread_barrier()
            _fetch_weights(weight, weight_ring, full, emptied, begin + following, block * block_n, True, stage_bytes)
            _fetch_x(x, x_ring, full, emptied, begin + following, True)
    total = mma_wait(0, deps=[total])

    is_last = True
    if SPLITS == 1:
        first, second = _halves(total, GATED, layout, both_layout)
    else:
        sums = partials + block * (SPLITS * block_w * block_t)
        _leave_sums(total, sums + split * (block_w * block_t), sums_layout)
        gl.thread_barrier()
        is_last = gl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1
        first = gl.zeros([block_n, block_t], gl.float32, layout)
        second = first
        if is_last:
            first, second = _add_splits(sums, w, t, block_w, block_t, SPLITS, GATED, layout)
            gl.store(counters + block, 0)
    if is_last:
        if PARTS > 0:
            first = first * scale[None, :]
            second = second * scale[None, :]
        if BIAS:
            first += added.to(gl.float32)[:, None]
        if GATED:
            first = first / (1.0 + gl.exp(-first)) * second
        if RESIDUAL:
            if block_t <= 32:
                first += before.to(gl.float32)
            else:
                first += gl.load(residual + places, mask=inside, other=0.0).to(gl.float32)
        result = first.to(out.dtype.element_ty)
        gl.store(out + places, result, mask=inside)
        if NEXT_NORM:
            rounded = gl.where(inside, result.to(gl.float32), 0.0)
            gl.store(scaled + places, (rounded * norms.to(gl.float32)[:, None]).to(out.dtype.element_ty), mask=inside)
            gl.store(next_square_sums + block * squares_pitch + t, gl.sum(rounded * rounded, axis=0))


@functools.lru_cache(maxsize=4096)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> Any:
    """How the copy engine reads blocks of a matrix seen as panels, their rows and PANEL of the width."""
    memory = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # a tensor would stay alive in the cache
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return TensorDescriptor(memory, list(shape), list(strides), list(block), layout)


def launch_pdl_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int, int],
    norm: tuple[int, float],
    config: PdlGemmConfig,
    options: dict[str, Any],
    workspace: Workspace,
) -> None:
    """As `launch_stream_k_gemm`, for what `are_tma_operands` accepts, on a device with `supports_gluon`."""
    rows, columns, width = sizes
    parts, eps = norm
    panels, panels_a_step = width // PANEL.value, config.block_k // PANEL.value
    pieces, pitch, block_t = 2 if options["GATED"] else 1, weight.stride(0), pdl_block_m(rows)
    blocks, steps = cdiv(columns, config.block_n), cdiv(width, config.block_k)
    steps_of_split = cdiv(steps, min(config.splits, steps))
    splits = cdiv(steps, steps_of_split)
    assert splits == 1 or blocks <= COUNTERS
    partial_floats = blocks * splits * pieces * config.block_n * block_t if splits > 1 else 0
    weight_block = (panels_a_step, pieces, config.block_n, PANEL.value)
    weight_strides = (PANEL.value, columns * pitch, pitch, 1)
    x_block = (panels_a_step, block_t, PANEL.value)
    _ahead_linear[(blocks, splits)](
        _descriptor(
            weight.data_ptr(), weight.dtype, (panels, pieces, columns, PANEL.value), weight_strides, weight_block
        ),
        _descriptor(x.data_ptr(), x.dtype, (panels, rows, PANEL.value), (PANEL.value, x.stride(0), 1), x_block),
        *ends,
        workspace.partials(partial_floats),
        workspace.counters,
        rows,
        columns,
        steps,
        steps_of_split,
        parts,
        1.0 / width,
        eps,
        STAGES=config.stages,
        SPLITS=splits,
        num_warps=WARPS.value,
        launch_pdl=True,
        **options | {"PARTS": max(32, options["PARTS"]) if parts else 0},
    )
