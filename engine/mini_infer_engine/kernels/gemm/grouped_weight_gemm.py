"""GEMM with weights of any group size, in the checkpoint's own order of columns (`grouped_weight.GroupedWeight`).

At most 64 rows of x: weights are widened in registers, each with its group's scale, and nothing but a bias is fused.
More rows: a widened copy of the layer, for cuBLAS. The kernels of experts also read weights by `widened_tile`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_REGISTER_M = 64
"""Rows up to which weights are widened in registers."""
_WIDENED = 1 << 28
"""Weights that are widened at once for more rows: only output layers have more."""


@triton.jit
def _scales_wide(stored):
    """Converts scales to fp32, from floats or from bytes that are exponents (E8M0), of which 0 is subnormal."""
    if stored.dtype == tl.uint8:
        bits = tl.where(stored == 0, 1 << 22, stored.to(tl.int32) << 23)
        scales = bits.to(tl.float32, bitcast=True)
    else:
        scales = stored.to(tl.float32)
    return scales


@triton.jit
def _e2m1_wide(values):
    """Converts E2M1 to fp32, from int32 in [0, 15]: sign, two bits of exponent, one of the fraction."""
    exponent = (values & 7) >> 1
    fraction = values & 1
    normal = (((exponent + 126) << 23) | (fraction << 22)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.5, normal)
    return tl.where(values >= 8, -size, size)


@triton.jit
def _by_column(
    parameters,
    rows,
    mask_rows,
    start,
    groups,
    ARE_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Loads scales or zero points of BLOCK_K columns from `start` on in fp32: [rows, BLOCK_K], or [rows, 1] for one
    group.

    GROUP: columns that share one; 0: the whole row. Each is loaded and widened once if groups are smaller than BLOCK_K
    and divide it.
    """
    first = parameters + rows * groups
    zero = 0.0 if parameters.dtype.element_ty.is_floating() else 0
    if GROUP == 0:
        stored = tl.load(first, mask=mask_rows, other=zero)[:, None]
    elif GROUP % BLOCK_K == 0:
        stored = tl.load(first + start // GROUP, mask=mask_rows, other=zero)[:, None]
    elif BLOCK_K % GROUP == 0:
        places = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        stored = tl.load(
            first[:, None] + places[None, :], mask=mask_rows[:, None] & (places < groups)[None, :], other=zero
        )
    else:
        places = (start + tl.arange(0, BLOCK_K)) // GROUP
        stored = tl.load(
            first[:, None] + places[None, :], mask=mask_rows[:, None] & (places < groups)[None, :], other=zero
        )
    found = _scales_wide(stored) if ARE_SCALES else stored.to(tl.float32)
    if GROUP > 0 and GROUP < BLOCK_K and BLOCK_K % GROUP == 0:
        of_each = tl.broadcast_to(found[:, :, None], (rows.shape[0], BLOCK_K // GROUP, GROUP))
        found = tl.reshape(of_each, (rows.shape[0], BLOCK_K))
    return found


@triton.jit
def widened_tile(
    values,
    scales,
    zeros,
    rows,
    mask_rows,
    start,
    K,
    row_bytes,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Loads weights of columns `start` to `start + BLOCK_K` as fp32 [rows, BLOCK_K], without factors; rows are int64.

    KIND is `GroupedWeight.kind`. row_bytes, the bytes of a row of values, is an argument of the kernel: if it were
    computed from K, the compiler would not know that it is aligned, and load byte by byte. `start` is a multiple of
    BLOCK_K. Columns beyond K have arbitrary finite values.
    """
    if KIND == "int4" or KIND == "fp4":
        pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
        mask = mask_rows[:, None] & (pairs < row_bytes)[None, :]
        both = tl.load(values + rows[:, None] * row_bytes + pairs[None, :], mask=mask, other=0).to(tl.int32)
        nibbles = tl.interleave(both & 15, both >> 4)
        wide = _e2m1_wide(nibbles) if KIND == "fp4" else nibbles.to(tl.float32)
    else:
        columns = start + tl.arange(0, BLOCK_K)
        mask = mask_rows[:, None] & (columns < K)[None, :]
        none = 0 if KIND == "int8" else 0.0
        wide = tl.load(values + rows[:, None] * row_bytes + columns[None, :], mask=mask, other=none).to(tl.float32)
    scale = _by_column(scales, rows, mask_rows, start, groups, True, GROUP, BLOCK_K)
    if zeros is None:
        wide = wide * scale
    else:
        middle = _by_column(zeros, rows, mask_rows, start, groups, False, GROUP, BLOCK_K)
        wide = wide * scale + middle if zeros.dtype.element_ty.is_floating() else (wide - middle) * scale
    return wide


@triton.jit(do_not_specialize=["M"])
def _gemm(
    x,
    values,
    scales,
    zeros,
    factors,
    order,
    bias,
    out,
    M,
    N,
    K,
    row_bytes,
    groups,
    x_stride,
    out_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes x @ weight.T + bias with one program per (tile of N, tile of M)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_n, mask_m = n < N, m < M
    rows = n.to(tl.int64)
    x_rows = x + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        column, mask_k = k, k < K
        if order is not None:
            column = tl.load(order + k, mask=mask_k, other=-1)
            mask_k = column >= 0
        inputs = tl.load(x_rows + column[:, None], mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        tile = widened_tile(values, scales, zeros, rows, mask_n, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K)
        acc = tl.dot(tile.to(inputs.dtype), inputs, acc, input_precision=PRECISION)
    if factors is not None:
        acc *= tl.load(factors + n, mask=mask_n, other=0.0)[:, None]
    if bias is not None:
        acc += tl.load(bias + n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, tl.trans(acc).to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _widen(
    values,
    scales,
    zeros,
    factors,
    order,
    out,
    N,
    K,
    row_bytes,
    groups,
    out_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Dequantises the weights, columns in x's order, with one program per (tile of N, tile of K)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)
    rows = n.to(tl.int64)
    tile = widened_tile(values, scales, zeros, rows, n < N, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K)
    if factors is not None:
        tile *= tl.load(factors + n, mask=n < N, other=0.0)[:, None]
    column, mask_k = k, k < K
    if order is not None:
        column = tl.load(order + k, mask=mask_k, other=-1)
        mask_k = column >= 0
    at = out + rows[:, None] * out_stride + column[None, :]
    tl.store(at, tile.to(out.dtype.element_ty), mask=(n < N)[:, None] & mask_k[None, :])


def kernel_group(weight: GroupedWeight) -> int:
    """Returns the columns that share a scale in the kernels' convention: 0 for the whole row."""
    return 0 if weight.group >= weight.k else weight.group


def expert_operands(
    weight: torch.Tensor | GroupedWeight,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, int], dict[str, Any]]:
    """Returns experts' kernels' arguments for a stack: its tensors, elements and groups of a row, KIND and GROUP."""
    if isinstance(weight, torch.Tensor):
        return (weight, None, None, None), (weight.shape[-1], 1), {"KIND": "plain", "GROUP": 0}
    assert weight.order is None
    parts = (weight.values, weight.scales, weight.zeros, weight.factors)
    sizes = weight.values.shape[-1], weight.scales.shape[-1]
    return parts, sizes, {"KIND": weight.kind, "GROUP": kernel_group(weight)}


def widened_groups(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises to [N, K] in a dtype, columns in x's order."""
    n, k = weight.shape[0], weight.k
    out = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    _widen[(cdiv(n, 32), cdiv(k, 128))](
        weight.values,
        weight.scales,
        weight.zeros,
        weight.factors,
        weight.order,
        out,
        n,
        k,
        weight.values.shape[-1],
        weight.scales.shape[-1],
        out.stride(0),
        KIND=weight.kind,
        GROUP=kernel_group(weight),
        BLOCK_N=32,
        BLOCK_K=128,
    )
    return out


def grouped_weight_linear(
    x: torch.Tensor, weight: GroupedWeight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [M, K] @ weight.T + bias: [M, N], in x's dtype, in `out` if given."""
    m, n, k = x.shape[0], weight.shape[0], weight.k
    assert x.stride(1) == 1
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not m:
        return out
    if m > _REGISTER_M:
        at_once = max(1, _WIDENED // k)
        for begin in range(0, n, at_once):
            rows = slice(begin, begin + at_once)
            part = weight if at_once >= n else weight.at(rows)
            torch.mm(x, widened_groups(part, x.dtype).t(), out=out[:, rows])
        return out if bias is None else out.add_(bias)
    narrow = x.dtype == torch.float32  # without tensor cores larger tiles do not fit the registers
    block_m = min(16 if narrow else 64, max(16, next_power_of_2(m)))
    # Narrow outputs in more tiles: a program reads its rows of the weight alone.
    block_n = 32 if narrow or n <= 8192 else 64
    _gemm[(cdiv(n, block_n), cdiv(m, block_m))](
        x,
        weight.values,
        weight.scales,
        weight.zeros,
        weight.factors,
        weight.order,
        bias,
        out,
        m,
        n,
        k,
        weight.values.shape[-1],
        weight.scales.shape[-1],
        x.stride(0),
        out.stride(0),
        KIND=weight.kind,
        GROUP=kernel_group(weight),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=64 if narrow else 128,
        PRECISION="ieee" if narrow else "tf32",
        num_warps=4,
        num_stages=2 if narrow else 5 if block_m == 16 else 3,  # the fewer rows, the more is memory all that counts
    )
    return out
