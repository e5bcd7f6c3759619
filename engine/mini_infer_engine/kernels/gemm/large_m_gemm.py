"""GEMM with quantised weights for more than 64 rows on Hopper, in Gluon: weights are widened in registers.

If a product is bound by arithmetic as much as by memory, neither reading the weights once for 64 rows nor a bf16 copy
of them is fast. Here a tile is 128 rows of weights, the left operand of wgmma in registers, by up to 256 rows of x,
which stay in shared memory. Two warpgroups, each with 64 of the weights' rows, share the x of a step, and a weight is
widened once for all rows of the tile. While the tensor cores multiply one step the next is widened. Scales of groups
are multiplied with the widened weights, in bf16; scales of rows with the sums, in fp32. If several programs share the K
of a tile (`large_m_schedule` decides), a second kernel adds the partial sums in a fixed order.

The weights' order of columns and their widening to bf16 are pdl_gemm's (`quantized_weight`, `widening`).
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mini_infer_engine.kernels.gemm.gemm_config import LARGE_TILE_N, LargeMConfig
from mini_infer_engine.kernels.gemm.large_m_schedule import large_m_schedule
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP, QuantizedWeight
from mini_infer_engine.kernels.gemm.widening import (
    NIBBLES,
    in_columns,
    offsets_of,
    scale_of,
    unit_of,
    widened_bytes,
)
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import Workspace

_SUM_ROWS = 8
"""Rows of x whose partial sums one program adds."""
WARPS = gl.constexpr(8)
PANEL = gl.constexpr(64)
"""Columns of K in a panel.

For x they are 128 bytes, a row of shared memory as TMA swizzles it; for weights 64 bytes.
"""
_SCALED_NIBBLES = gl.constexpr(
    NIBBLES.value.rstrip().removesuffix("}")
    + """
    mul.bf16x2 $0, $0, $7;
    mul.bf16x2 $1, $1, $7;
    mul.bf16x2 $2, $2, $8;
    mul.bf16x2 $3, $3, $8;
    }
    """
)
"""The instructions of NIBBLES, followed by a multiplication by scale and unit in bf16."""


@gluon.jit
def _fetch(weight, x, weight_ring, x_ring, full, stage, step, first_n, first_m, pred,
           STAGE_BYTES: gl.constexpr, PANELS: gl.constexpr, X_PANELS: gl.constexpr):  # fmt: skip
    """Begins to copy one step's weights and x."""
    mbarrier.expect(full.index(stage), STAGE_BYTES, pred=pred)
    for panel in gl.static_range(PANELS):
        at = stage * PANELS + panel
        column = (step * PANELS + panel) * PANEL
        tma.async_copy_global_to_shared(weight, [first_n, column], full.index(stage), weight_ring.index(at), pred=pred)
    for x_panel in gl.static_range(X_PANELS):
        at = stage * X_PANELS + x_panel
        column = (step * X_PANELS + x_panel) * PANEL
        tma.async_copy_global_to_shared(x, [first_m, column], full.index(stage), x_ring.index(at), pred=pred)


@gluon.jit
def _parameters(scales, group, n, N, GROUPED: gl.constexpr):
    """Loads a group's scales and zero points of some rows; for rows outside the weight, those of its last row."""
    found = n
    if GROUPED:
        found = gl.load(scales + group * N + gl.minimum(n, N - 1))
    return found


@gluon.jit
def _wide_bytes(values, parameters, GROUPED: gl.constexpr):
    """Widens 64 columns of 8-bit weights to [rows, 64] bf16 as wgmma reads them; without scales, over their unit."""
    if GROUPED:
        wide = widened_bytes(values, (scale_of(parameters) * unit_of(values.dtype)).to(gl.bfloat16))
    else:
        wide = widened_bytes(values)
    return wide


@gluon.jit
def _wide_nibbles(values, parameters):
    """Dequantises 128 columns of 4-bit weights to two halves [rows, 64] bf16 as wgmma reads them."""
    scales = (scale_of(parameters) * unit_of(values.dtype)).to(gl.bfloat16)
    low, high = gl.inline_asm_elementwise(
        _SCALED_NIBBLES,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [values, offsets_of(parameters)[:, None], scales[:, None]],
        (gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return in_columns(low, high)


@gluon.jit
def _widened_step(ring, stage, parameters, LAYOUT: gl.constexpr, OPERAND: gl.constexpr, PANELS: gl.constexpr,
                  GROUPED: gl.constexpr):  # fmt: skip
    """Returns one step's weights for wgmma: the first 64 columns and the second, which equal the first if there is one
    panel.
    """
    if ring.dtype == gl.uint8:
        first, second = _wide_nibbles(ring.index(stage).load(LAYOUT), parameters)
    else:
        first = _wide_bytes(ring.index(stage * PANELS).load(LAYOUT), parameters, GROUPED)
        second = first
        if PANELS == 2:
            second = _wide_bytes(ring.index(stage * PANELS + 1).load(LAYOUT), parameters, GROUPED)
    first = gl.convert_layout(first, OPERAND, assert_trivial=True)
    second = gl.convert_layout(second, OPERAND, assert_trivial=True)
    return first, second


@gluon.jit
def _begin_products(acc, first, second, x_ring, stage, X_PANELS: gl.constexpr):
    """Has the tensor cores add a step's products asynchronously, in X_PANELS groups."""
    acc = warpgroup_mma(first, x_ring.index(stage * X_PANELS).permute((1, 0)), acc, is_async=True)
    if X_PANELS == 2:
        acc = warpgroup_mma(second, x_ring.index(stage * X_PANELS + 1).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.constexpr_function
def _value_layout():
    """Returns a layout in which a thread has 16 bytes of each of the rows that wgmma expects from it."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [128, 64])


@gluon.jit
def _work_of(program, k_steps, whole_tiles, split_tiles, steps_of_split):
    """Returns a program's tile, its first step of K, and its number of steps, as `LargeMSchedule` assigns them."""
    part = gl.maximum(program - whole_tiles, 0) // gl.maximum(split_tiles, 1)
    first_step = part * steps_of_split
    most_steps = gl.where(program < whole_tiles, k_steps, steps_of_split)
    return program - part * split_tiles, first_step, gl.minimum(k_steps - first_step, most_steps)


@gluon.jit
def _store_product(acc, bias, out, M, N, first_m, first_n, out_stride, acc_layout: gl.constexpr,
                   BIAS: gl.constexpr):  # fmt: skip
    """Stores a whole tile's sums, [rows of weights, rows of x]."""
    block_n: gl.constexpr = acc.shape[0]
    block_m: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    if BIAS:
        of_acc = first_n + gl.arange(0, block_n, layout=gl.SliceLayout(1, acc_layout))
        acc = acc + gl.load(bias + of_acc, mask=of_acc < N, other=0.0).to(gl.float32)[:, None]
    result = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    n = first_n + gl.arange(0, block_n, layout=gl.SliceLayout(1, layout))
    m = first_m + gl.arange(0, block_m, layout=gl.SliceLayout(0, layout))
    at = m.to(gl.int64)[None, :] * out_stride + n[:, None]
    gl.store(out + at, result, mask=(n < N)[:, None] & (m < M)[None, :])


@gluon.jit
def _store_partial_sums(acc, partials, slot, M, first_m, acc_layout: gl.constexpr):
    """Stores one part's sums of a tile, in its own place [rows of x, rows of weights]; rows beyond M are left out."""
    block_n: gl.constexpr = acc.shape[0]
    block_m: gl.constexpr = acc.shape[1]
    n = gl.arange(0, block_n, layout=gl.SliceLayout(1, acc_layout))
    m = gl.arange(0, block_m, layout=gl.SliceLayout(0, acc_layout))
    at = (slot * block_m + m).to(gl.int64)[None, :] * block_n + n[:, None]
    gl.store(partials + at, acc, mask=(first_m + m < M)[None, :])


@gluon.jit(do_not_specialize=["M", "k_steps", "whole_tiles", "split_tiles", "steps_of_split"])
def _large_m_gemm(weight, x, scales, bias, out, partials, M, N, k_steps, whole_tiles, split_tiles, steps_of_split,
                  out_stride, STAGES: gl.constexpr, GROUPED: gl.constexpr, BIAS: gl.constexpr,
                  HAS_SPLITS: gl.constexpr, BLOCK_K: gl.constexpr):  # fmt: skip
    """Runs one program of a `LargeMSchedule`; tiles of M come first, so that neighbours share weights."""
    block_n: gl.constexpr = weight.block_shape[0]
    block_m: gl.constexpr = x.block_shape[0]
    is_nibbles: gl.constexpr = weight.dtype == gl.uint8
    x_panels: gl.constexpr = BLOCK_K // PANEL
    panels: gl.constexpr = x_panels // 2 if is_nibbles else x_panels
    stage_bytes: gl.constexpr = panels * block_n * PANEL + x_panels * block_m * PANEL * 2
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, block_m, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    layout: gl.constexpr = _value_layout()

    program = gl.program_id(0)
    tile, first_step, step_count = _work_of(program, k_steps, whole_tiles, split_tiles, steps_of_split)
    tiles_of_m = (M + block_m - 1) // block_m
    first_m = tile % tiles_of_m * block_m
    first_n = tile // tiles_of_m * block_n
    pair_count = (step_count + 1) // 2
    even_count = pair_count * 2  # a last step beyond K is zeros
    weight_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * panels, block_n, PANEL], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * x_panels, block_m, PANEL], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(full.index(early), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for early in gl.static_range(STAGES):
        _fetch(
            weight, x, weight_ring, x_ring, full, early, first_step + early, first_n, first_m, early < even_count,
            stage_bytes, panels, x_panels,
        )  # fmt: skip

    rows = first_n + gl.arange(0, block_n, layout=gl.SliceLayout(1, layout))
    following = _parameters(scales, first_step * BLOCK_K // 128, rows, N, GROUPED)
    acc = gl.zeros([block_n, block_m], gl.float32, acc_layout)
    # Two steps at a time, for a step's weights stay in their registers while they are multiplied: the next step's need
    # others. The assumption leaves no way around the loop, on which accumulators would be copied while wgmma writes
    # them (ptxas would run one wgmma after another).
    gl.assume(pair_count > 0)
    for pair in range(pair_count):
        for half in gl.static_range(2):
            step = pair * 2 + half
            stage = step % STAGES
            parameters = following
            if GROUPED:  # of the next step, which take longer than this one's arithmetic to arrive
                next_step = gl.minimum(first_step + step + 1, k_steps - 1)
                following = _parameters(scales, next_step * BLOCK_K // 128, rows, N, GROUPED)
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            first, second = _widened_step(weight_ring, stage, parameters, layout, operand, panels, GROUPED)
            acc = _begin_products(acc, first, second, x_ring, stage, x_panels)
            acc = mma_wait(x_panels, deps=[acc])  # products of the step before are done
            gl.thread_barrier()
            later = step - 1 + STAGES
            _fetch(
                weight, x, weight_ring, x_ring, full, later % STAGES, first_step + later, first_n, first_m,
                (step > 0) & (later < even_count), stage_bytes, panels, x_panels,
            )  # fmt: skip
    acc = mma_wait(0, deps=[acc])
    gl.thread_barrier()  # the ring becomes scratch memory

    if not GROUPED:
        n = first_n + gl.arange(0, block_n, layout=gl.SliceLayout(1, acc_layout))
        acc = acc * unit_of(weight.dtype) * gl.load(scales + n, mask=n < N, other=0.0)[:, None]
    if HAS_SPLITS:
        if program < whole_tiles:
            _store_product(acc, bias, out, M, N, first_m, first_n, out_stride, acc_layout, BIAS)
        else:
            _store_partial_sums(acc, partials, program - whole_tiles, M, first_m, acc_layout)
    else:
        _store_product(acc, bias, out, M, N, first_m, first_n, out_stride, acc_layout, BIAS)


@triton.jit(do_not_specialize=["M", "whole_tiles", "split_tiles"])
def _sum_parts(partials, bias, out, M, N, whole_tiles, split_tiles, out_stride, SPLITS: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Adds all parts in a fixed order, and the bias, with one program per (split tile, some of its rows of x)."""
    tile = whole_tiles + tl.program_id(0)
    tiles_of_m = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_N)
    m = tile % tiles_of_m * BLOCK_M + row
    n = tile // tiles_of_m * BLOCK_N + column
    mask = (m < M)[:, None] & (n < N)[None, :]
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        slot = (part * split_tiles + tl.program_id(0)).to(tl.int64)
        place = slot * (BLOCK_M * BLOCK_N) + row[:, None] * BLOCK_N + column[None, :]
        total += tl.load(partials + place, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=4096)
def _descriptor(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> Any:
    """Returns the TMA descriptor of a matrix in tiles of some rows and 64 values, which are 128 bytes or 64."""
    memory = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # a tensor would stay alive in the cache
    bits = dtype.itemsize * 8
    layout = gl.NVMMASharedLayout(swizzle_byte_width=8 * bits, element_bitwidth=bits, rank=2)
    return TensorDescriptor(memory, list(shape), list(strides), [rows, PANEL.value], layout)


def large_m_gemm(
    x: torch.Tensor,
    weight: QuantizedWeight,
    config: LargeMConfig,
    *,
    sm_count: int,
    workspace: Workspace,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x [M, K] @ weight.T + bias: [M, N] bf16, in `out` if given. `are_large_m_operands` must be true."""
    (m, k), n = x.shape, weight.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not m:
        return out
    assert config.block_k == GROUP or (weight.bits == 8 and not weight.is_grouped), "a step is one group"
    values = weight.values
    schedule = large_m_schedule(m, n, k, config, sm_count=sm_count)
    partials = workspace.partials(schedule.partial_sums)
    _large_m_gemm[(schedule.programs,)](
        _descriptor(values.data_ptr(), values.dtype, tuple(values.shape), values.stride(), LARGE_TILE_N),
        _descriptor(x.data_ptr(), x.dtype, (m, k), x.stride(), config.block_m),
        weight.scales,
        bias,
        out,
        partials,
        m,
        n,
        schedule.k_steps,
        schedule.whole_tiles,
        schedule.split_tiles,
        schedule.steps_of_split,
        out.stride(0),
        STAGES=config.stages,
        GROUPED=weight.is_grouped,
        BIAS=bias is not None,
        HAS_SPLITS=config.splits > 1,
        BLOCK_K=config.block_k,
        num_warps=WARPS.value,
    )
    if schedule.split_tiles:
        _sum_parts[(schedule.split_tiles, cdiv(min(m, config.block_m), _SUM_ROWS))](
            partials, bias, out, m, n, schedule.whole_tiles, schedule.split_tiles, out.stride(0),
            SPLITS=schedule.splits, BLOCK_M=config.block_m, BLOCK_N=LARGE_TILE_N, ROWS=_SUM_ROWS, num_warps=4,
        )  # fmt: skip
    return out
