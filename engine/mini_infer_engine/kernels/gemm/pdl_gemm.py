"""Split-K GEMM with programmatic dependent launch (CUDA C++ Programming Guide) for M <= 64 on Hopper, in Gluon.

Weights do not depend on the kernel before. So a program begins while that kernel still runs, lets TMA fill a ring of
shared memory with weights, and only then waits for what that kernel writes. Memory stays busy between two GEMMs, and a
launch costs next to nothing: docs/adr/0012. (GEMMs of a decode step of Qwen3-0.6B on an H200: 486 us where they took
707.)

Weights are the left operand of wgmma, 64 or 128 of their rows a tile; a gated GEMM's tile is half gate, half up. Rows
of x, at least eight, are the instruction's N, so few of them cost little. Programs are (tile of N, split of K).
Quantised weights (`quantized_weight`) stay packed in the ring and become bf16 in registers, from which wgmma
reads its left operand. A row's scale multiplies at the end, a group's the sum of its 128 products.

Why it is safe. A kernel launched this way waits, in every program and before it reads or writes anything but weights,
until the kernel before it has ended, all writes done. It ends after its own wait, so a kernel that waits for it knows
that all kernels before it have ended, too; one launched as usual waits for the one before in any case. Weights, biases
and norms' weights are read before the wait: they must not be written by the kernel right before, nor while that runs.
All kernels of this package that are launched this way keep to it: this one, decode_attention, hopper_prefill_attention.
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
from mini_infer_engine.kernels.pdl import grid_dependency_wait, launch_dependents
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

PANEL = gl.constexpr(64)
"""Of K: 128 bytes, a row of shared memory in the swizzled layout that TMA writes and wgmma reads."""
PANEL_BYTES = gl.constexpr(64)
"""Of K in a panel of quantised weights: 64 values of 8 bits or 128 of 4."""
WARPS = gl.constexpr(4)
NIBBLES = gl.constexpr(
    """
    {
    .reg .b32 word, offset;
    mov.b32 offset, 0x43004300;
    lop3.b32 $0, $4, 0x000F000F, offset, 0xEA;
    shr.b32 word, $4, 4;
    lop3.b32 $1, word, 0x000F000F, offset, 0xEA;
    shr.b32 word, $4, 8;
    lop3.b32 $2, word, 0x000F000F, offset, 0xEA;
    shr.b32 word, $4, 12;
    lop3.b32 $3, word, 0x000F000F, offset, 0xEA;
    sub.bf16x2 $0, $0, $5;
    sub.bf16x2 $1, $1, $5;
    sub.bf16x2 $2, $2, $6;
    sub.bf16x2 $3, $3, $6;
    }
    """
)
"""Eight integers of a word, less 128 + their zero point, as bf16: 0x4300 is 128, of which the last bit is worth 1 (Kim
et al. 2022, arXiv 2211.10017). Integers i and i + 4 of the word share a register.
"""
INT8 = gl.constexpr(
    """
    {
    .reg .b32 word, offset, sign;
    mov.b32 offset, 0x43004300;
    lop3.b32 $0, $2, 0x007F007F, offset, 0xEA;
    lop3.b32 sign, $2, 0x00800080, offset, 0xEA;
    sub.bf16x2 $0, $0, sign;
    shr.b32 word, $2, 8;
    lop3.b32 $1, word, 0x007F007F, offset, 0xEA;
    lop3.b32 sign, word, 0x00800080, offset, 0xEA;
    sub.bf16x2 $1, $1, sign;
    }
    """
)
"""Four signed bytes as bf16, of which bytes 0 and 2 share a register: 128 + the lower seven bits, less 128 or 256."""
FP8 = gl.constexpr(
    """
    {
    .reg .b32 word, number, scale;
    mov.b32 scale, 0x7B807B80;
    shl.b32 word, $2, 8;
    and.b32 number, word, 0x7F007F00;
    shr.b32 number, number, 4;
    lop3.b32 $0, word, 0x80008000, number, 0xEA;
    mul.bf16x2 $0, $0, scale;
    and.b32 number, $2, 0x7F007F00;
    shr.b32 number, number, 4;
    lop3.b32 $1, $2, 0x80008000, number, 0xEA;
    mul.bf16x2 $1, $1, scale;
    }
    """
)
"""Four e4m3 numbers as bf16, of which bytes 0 and 2 share a register: exponent and mantissa put into bf16's places,
times 2 ** (127 - 7), the difference of the exponents' biases; subnormal numbers become right, too.
"""


@gluon.jit
def _fetch_weights(weight, ring, full, stage, step, first_row, pred, STAGE_BYTES: gl.constexpr):
    """TMA copy of one step's weights. The barrier expects x of this step, too."""
    panels: gl.constexpr = weight.block_shape[0]
    mbarrier.expect(full.index(stage), STAGE_BYTES, pred=pred)
    coordinates = [step * panels, 0, first_row, 0]
    tma.async_copy_global_to_shared(weight, coordinates, full.index(stage), ring.index(stage), pred=pred)


@gluon.jit
def _fetch_scales(scales, kept, first_group, group_count, first_row, N, BLOCK_N: gl.constexpr, PIECES: gl.constexpr):
    """Begin to copy all groups' scales of a split of a tile into shared memory [groups, rows of the tile]."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = gl.arange(0, BLOCK_N * PIECES, layout=layout)
    column = first_row + row % BLOCK_N
    sources = scales + first_group * (N * PIECES) + row // BLOCK_N * N + column
    for group in range(group_count):
        pointers = sources + group * (N * PIECES)
        async_copy.async_copy_global_to_shared(kept.index(group), pointers, mask=column < N)
    async_copy.commit_group()


@gluon.jit
def _scale_of(parameters):
    """fp32, from fp32 or from the low half of a word, where it is fp16."""
    if parameters.dtype == gl.float32:
        return parameters
    return parameters.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.constexpr_function
def _panel_layout(rows):
    """16 bytes of each row a thread, of those rows of which wgmma wants values from it."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], *([[64, 0]] if rows == 128 else [])]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, 64])


@gluon.jit
def _widened_bytes(panel):
    """64 columns of 8-bit weights, [rows, 64] bf16 as wgmma reads them: see `quantized_weight.interleaved`."""
    rows: gl.constexpr = panel.shape[0]
    conversion: gl.constexpr = INT8 if panel.dtype == gl.int8 else FP8
    wide = gl.inline_asm_elementwise(
        conversion, "=&r,=&r,r", [panel.load(_panel_layout(rows))], gl.bfloat16, is_pure=True, pack=4
    )
    # Row; thread, step of 16 columns, upper 8, odd.
    steps = gl.permute(gl.reshape(wide, [rows, 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    return gl.reshape(steps, [rows, 64])


@gluon.jit
def _widened_nibbles(panel, parameters):
    """128 columns of 4-bit weights less their zero points: two halves [rows, 64] bf16 as wgmma reads them.

    `quantized_weight.packed_nibbles` says which byte is which column: registers change names here, no data moves.
    """
    rows: gl.constexpr = panel.shape[0]
    layout: gl.constexpr = _panel_layout(rows)
    zeros = parameters.load(gl.SliceLayout(1, layout)) >> 16
    offsets = (zeros + 128).to(gl.float32).to(gl.bfloat16)
    low, high = gl.inline_asm_elementwise(
        NIBBLES,
        "=&r,=&r,=&r,=&r,r,r,r",
        [panel.load(layout), offsets[:, None]],
        (gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # Row; thread, half, word, high and low bit of the byte in it; lower or higher half of the word's bytes.
    both = gl.reshape(gl.join(low, high), [rows, 4, 2, 2, 2, 2, 2])
    return gl.split(gl.reshape(gl.permute(both, (0, 3, 6, 4, 1, 5, 2)), [rows, 64, 2]))


@gluon.jit
def _multiply_quantized(acc, weight_panels, x_panels, scales, stage, first_group, GROUPS: gl.constexpr,
                        GROUPED: gl.constexpr):  # fmt: skip
    """One step: acc plus the product of quantised weights and x, times the scales of groups where there are any.

    One group is widened while the one before is multiplied.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    # Products of the group before, which run while this one is widened, and its scale.
    earlier, earlier_scale = acc, acc
    for index in gl.static_range(GROUPS):
        at = stage * GROUPS + index
        group = first_group + index
        x_first = x_panels.index(at * 2).permute((1, 0))
        x_second = x_panels.index(at * 2 + 1).permute((1, 0))
        if weight_panels.dtype == gl.uint8:
            first, second = _widened_nibbles(weight_panels.index(at), scales.index(group))
        else:
            first = _widened_bytes(weight_panels.index(at * 2))
            second = _widened_bytes(weight_panels.index(at * 2 + 1))
        first = gl.convert_layout(first, operand, assert_trivial=True)
        second = gl.convert_layout(second, operand, assert_trivial=True)
        if GROUPED:
            scale = _scale_of(scales.index(group).load(gl.SliceLayout(1, acc.type.layout)))
            products = warpgroup_mma(first, x_first, gl.zeros_like(acc), is_async=True)
            products = warpgroup_mma(second, x_second, products, is_async=True)
            if index > 0:
                acc += mma_wait(2, deps=[earlier]) * earlier_scale[:, None]
            earlier = products
            earlier_scale = scale
        else:
            acc = warpgroup_mma(first, x_first, acc, is_async=True)
            acc = warpgroup_mma(second, x_second, acc, is_async=True)
    if GROUPED:
        acc += mma_wait(0, deps=[earlier]) * earlier_scale[:, None]
    else:
        acc = mma_wait(0, deps=[acc])
    return acc


@gluon.jit
def _fetch_x(x, ring, full, stage, step, pred):
    panels: gl.constexpr = x.block_shape[0]
    coordinates = [step * panels, 0, 0]
    tma.async_copy_global_to_shared(x, coordinates, full.index(stage), ring.index(stage), pred=pred)


@gluon.jit
def _gate_and_up(acc, GATED: gl.constexpr, LAYOUT: gl.constexpr, BOTH_LAYOUT: gl.constexpr):
    """The accumulator in the epilogue's layout: [N, M] of the gate, or of all, and of up."""
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
    """Partial sums of a split, for the split that arrives last."""
    offs_w = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    offs_t = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    gl.store(partials + offs_t[None, :] * acc.shape[0] + offs_w[:, None], acc)


@gluon.jit
def _sum_partials(tile_partials, offs_w, offs_t, BLOCK_W: gl.constexpr, BLOCK_T: gl.constexpr, SPLITS: gl.constexpr,
                  GATED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """All splits' partial sums, as `_gate_and_up` gives them; added in a fixed order, so that results repeat bit for
    bit.
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
                  KEPT_GROUPS: gl.constexpr):  # fmt: skip
    """Split-K with PDL: program (tile of N, split of K). The split that arrives last adds all sums and runs the
    epilogue.
    """
    launch_dependents()
    panels: gl.constexpr = weight.block_shape[0]
    pieces: gl.constexpr = weight.block_shape[1]
    block_n: gl.constexpr = weight.block_shape[2]
    block_w: gl.constexpr = pieces * block_n
    block_t: gl.constexpr = x.block_shape[1]
    squares_pitch: gl.constexpr = block_t if block_t > 16 else 16  # portable_block_m
    is_quantized: gl.constexpr = weight.dtype.primitive_bitwidth == 8
    x_panel_count: gl.constexpr = x.block_shape[0]
    weight_bytes: gl.constexpr = block_w * panels * (PANEL_BYTES if is_quantized else PANEL * 2)
    stage_bytes: gl.constexpr = weight_bytes + block_t * x_panel_count * PANEL * 2
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, block_t, 16])
    vector: gl.constexpr = 8 if block_n * block_t >= 1024 else block_n * block_t // 128
    lanes: gl.constexpr = block_n // vector
    layout: gl.constexpr = gl.BlockedLayout([vector, 1], [lanes, 32 // lanes], [1, WARPS], [0, 1])
    both_layout: gl.constexpr = gl.BlockedLayout([vector, 1, 2], [lanes, 32 // lanes, 1], [1, WARPS, 1], [2, 0, 1])
    squares_layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0])
    matrix_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    tile_n = gl.program_id(0)
    split = gl.program_id(1)
    first_step = split * steps_of_split
    step_count = gl.minimum(k_steps - first_step, steps_of_split)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2) if is_quantized else matrix_layout
    weight_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, panels, pieces, block_n, 64], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, x_panel_count, block_t, PANEL], x.layout)
    weight_panels = weight_ring._reinterpret(weight.dtype, [STAGES * panels, block_w, 64], weight_layout)
    x_panels = x_ring._reinterpret(x.dtype, [STAGES * x_panel_count, block_t, PANEL], matrix_layout)
    kept_scales = x_panels  # where groups have no scales, nothing reads them
    if KEPT_GROUPS:
        kept_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        kept_scales = gl.allocate_shared_memory(scales.dtype.element_ty, [KEPT_GROUPS, block_w], kept_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
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
    groups_a_step: gl.constexpr = x_panel_count // 2
    if KEPT_GROUPS:
        _fetch_scales(
            scales,
            kept_scales,
            first_step * groups_a_step,
            step_count * groups_a_step,
            tile_n * block_n,
            N,
            block_n,
            pieces,
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
        _fetch_x(x, x_ring, full, stage_early, first_step + stage_early, stage_early < step_count)
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
        async_copy.wait_group(0)
        gl.thread_barrier()
    acc = gl.zeros([block_w, block_t], gl.float32, acc_layout)
    for step in range(step_count):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if is_quantized:
            acc = _multiply_quantized(
                acc,
                weight_panels,
                x_panels,
                kept_scales,
                stage,
                step * groups_a_step,
                groups_a_step,
                KEPT_GROUPS > 0,
            )
        else:
            for panel in gl.static_range(panels):
                at = stage * panels + panel
                acc = warpgroup_mma(weight_panels.index(at), x_panels.index(at).permute((1, 0)), acc, is_async=True)
            acc = mma_wait(panels, deps=[acc])  # the steps before are done
        following = step - 1 + STAGES
        if (step > 0) & (following < step_count):
            emptied = (step - 1) % STAGES
            gl.thread_barrier()
            _fetch_weights(
                weight, weight_ring, full, emptied, first_step + following, tile_n * block_n, True, stage_bytes
            )
            _fetch_x(x, x_ring, full, emptied, first_step + following, True)
    if not is_quantized:
        acc = mma_wait(0, deps=[acc])

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
            first = first * row_scales[:, None]
            second = second * up_scales[:, None]
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
    """TMA descriptor of a matrix seen as panels, their rows and 64 values, which are 128 bytes or 64."""
    memory = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # a tensor would stay alive in the cache
    bits = dtype.itemsize * 8
    layout = gl.NVMMASharedLayout(swizzle_byte_width=8 * bits, element_bitwidth=bits, rank=len(shape))
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
    """As `launch_stream_k_gemm`, for what `are_tma_operands` accepts, on a device with `supports_gluon`."""
    m, n, k = sizes
    parts, eps = norm
    values, scales, bits = (
        (weight.values, weight.scales, weight.bits) if isinstance(weight, QuantizedWeight) else (weight, None, 16)
    )
    weight_panels, x_panels = values.shape[1] // PANEL.value, cdiv(k, PANEL.value)
    pieces, pitch, block_t = 2 if options["GATED"] else 1, values.stride(0), pdl_block_m(m)
    tiles, k_steps = cdiv(n, config.block_n), cdiv(k, config.block_k)
    steps_of_split = cdiv(k_steps, min(config.splits, k_steps))
    splits = cdiv(k_steps, steps_of_split)
    assert splits == 1 or tiles <= COUNTERS
    partial_floats = tiles * splits * pieces * config.block_n * block_t if splits > 1 else 0
    # A panel is 64 values of the tensor: of 4-bit weights, 128 columns.
    weight_block = (config.block_k // (128 if bits == 4 else 64), pieces, config.block_n, PANEL.value)
    weight_shape, weight_strides = (weight_panels, pieces, n, PANEL.value), (PANEL.value, n * pitch, pitch, 1)
    x_block = (config.block_k // PANEL.value, block_t, PANEL.value)
    kept_groups = 0
    if isinstance(weight, QuantizedWeight) and weight.is_grouped:
        assert weight.scales.shape[0] * GROUP == k_steps * config.block_k, "the last step has groups without scales"
        kept_groups = steps_of_split * config.block_k // GROUP
    _pdl_gemm[(tiles, splits)](
        _descriptor(values.data_ptr(), values.dtype, weight_shape, weight_strides, weight_block),
        _descriptor(x.data_ptr(), x.dtype, (x_panels, m, PANEL.value), (PANEL.value, x.stride(0), 1), x_block),
        scales,
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
        num_warps=WARPS.value,
        launch_pdl=True,
        **options | {"PARTS": max(32, options["PARTS"]) if parts else 0},
    )
