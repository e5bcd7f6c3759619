"""GEMM with quantised weights for any M and device, where `pdl_gemm` cannot run.

Rows of x are first brought into the weights' order of columns, and rounded to FP8 or int8 on the way for W8A8 (with a
dynamic scale for each row). At most 64 rows: weights are widened in registers, as the left operand of the tensor cores.
More: FP8 by cuBLAS or CUTLASS (`torch._scaled_mm`), W8A8 by integer tensor cores (`torch._int_mm`); other integers are
widened to a bf16 copy for cuBLAS, which then costs less than its product.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.quantized_weight import GROUP, QuantizedWeight
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_REGISTER_M = 64
"""Rows up to which integers are widened in registers on a GPU with tensor cores; more pay for a bf16 copy for cuBLAS.

(7B on an H200, 256 rows: widening in registers took 18 ms a pass more than bf16 weights.)
"""
_W8A8_M = 64
"""Rows above which products are W8A8: of FP8 weights, and of integers whose checkpoint requests it."""
_WIDEST_ROW = 32768
"""Columns of a row of activations that fit a program's registers."""
_STEP = tl.constexpr(GROUP)


@triton.jit
def in_order(row, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Permutes columns [BLOCK] like `quantized_weight.column_order`, between threads: memory is accessed in order."""
    if BITS == 8:  # step, upper 8, thread, odd
        pieces = tl.permute(tl.reshape(row, (BLOCK // 64, 4, 2, 4, 2)), (0, 3, 1, 4, 2))
    else:  # word, step, upper 8, thread, odd
        pieces = tl.permute(tl.reshape(row, (BLOCK // 128, 4, 2, 2, 4, 2)), (0, 3, 4, 1, 5, 2))
    return tl.reshape(pieces, (BLOCK,))


@triton.jit
def _rounded(values, scale, dtype: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Divides values by their scale, rounds them to the nearest of a type, and permutes them to the weights' order."""
    if LARGEST > 0:
        values = values.to(tl.float32) / scale
    if LARGEST == 127:
        values = tl.floor(values + 0.5)
    return in_order(values.to(dtype), BITS, BLOCK)


@triton.jit
def _reorder(
    x,
    out,
    scales,
    K,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Permutes one row per program to the weights' order of columns.

    LARGEST: the value to which the row's largest is scaled (448: FP8, 127: int8), with the scale stored; 0: no scaling.
    WHOLE: a row is one block, which is read once.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, BLOCK)
    source, target = x + row * x_stride, out + row * out_stride
    scale = 1.0
    if WHOLE:
        whole = tl.load(source + position, mask=position < K, other=0.0)
    if LARGEST > 0:
        if WHOLE:
            largest = tl.abs(whole.to(tl.float32))
        else:
            largest = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(0, K, BLOCK):
                values = tl.load(source + start + position, mask=start + position < K, other=0.0)
                largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
        scale = tl.maximum(tl.max(largest, axis=0) / LARGEST, 1e-12)
        tl.store(scales + row, scale)
    if WHOLE:
        tl.store(target + position, _rounded(whole, scale, out.dtype.element_ty, BITS, LARGEST, BLOCK),
                 mask=position < out_stride)  # fmt: skip
    else:
        for start in range(0, out_stride, BLOCK):
            values = tl.load(source + start + position, mask=start + position < K, other=0.0)
            tl.store(target + start + position, _rounded(values, scale, out.dtype.element_ty, BITS, LARGEST, BLOCK),
                     mask=start + position < out_stride)  # fmt: skip


def reordered(
    x: torch.Tensor, weight: QuantizedWeight, *, to: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x [M, K] with columns in the weight's order, zeros up to its padded K, and fp32 scales [M, 1] of rows.

    Scales are set only if `to` is FP8 or int8.
    """
    m, k = x.shape
    assert x.stride(1) == 1
    width = cdiv(k, GROUP) * GROUP
    out = torch.empty((m, width), dtype=to or x.dtype, device=x.device)
    scales = torch.empty((m, 1), dtype=torch.float32, device=x.device)
    if m:
        largest = 0 if to is None else 127 if to == torch.int8 else 448
        whole = largest > 0 and width <= _WIDEST_ROW
        block = next_power_of_2(width) if whole else min(2048, next_power_of_2(width))
        _reorder[(m,)](
            x, out, scales, k, x.stride(0), width, BITS=weight.bits, LARGEST=largest, BLOCK=block, WHOLE=whole,
            num_warps=min(16, max(4, block // 1024)),
        )  # fmt: skip
    return out, scales


@triton.jit
def _half_scale(parameters):
    """Converts a scale to fp32, from fp32 or from fp16 in the low half of a word."""
    if parameters.dtype == tl.float32:
        scale = parameters
    else:
        scale = parameters.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale


@triton.jit(do_not_specialize=["M"])
def _quantized_gemm(
    x,
    weight,
    scales,
    bias,
    out,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiplies widened weights and reordered rows with one program per (tile of N, tile of M); K is padded."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_n = n < N
    mask_m = (m < M)[None, :]
    place = tl.arange(0, 64)
    x_at = x + m.to(tl.int64)[None, :] * x_stride + place[:, None]
    weight_at = weight + n.to(tl.int64)[:, None] * weight_stride + place[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, K, 128):
        lower_x = tl.load(x_at + start, mask=mask_m, other=0.0)
        upper_x = tl.load(x_at + start + 64, mask=mask_m, other=0.0)
        if GROUPED:
            parameters = tl.load(scales + start // 128 * N + n, mask=mask_n, other=0)
        if BITS == 4:
            both = tl.load(weight_at + start // 2, mask=mask_n[:, None], other=0).to(tl.int32)
            zeros = (parameters >> 16)[:, None]
            lower = ((both & 15) - zeros).to(tl.float32).to(x.dtype.element_ty)
            upper = ((both >> 4) - zeros).to(tl.float32).to(x.dtype.element_ty)
        else:
            lower = tl.load(weight_at + start, mask=mask_n[:, None], other=0.0).to(x.dtype.element_ty)
            upper = tl.load(weight_at + start + 64, mask=mask_n[:, None], other=0.0).to(x.dtype.element_ty)
        if GROUPED:
            products = tl.dot(lower, lower_x, input_precision=PRECISION)
            products = tl.dot(upper, upper_x, products, input_precision=PRECISION)
            acc += products * _half_scale(parameters)[:, None]
        else:
            acc = tl.dot(lower, lower_x, acc, input_precision=PRECISION)
            acc = tl.dot(upper, upper_x, acc, input_precision=PRECISION)
    if not GROUPED:
        acc *= tl.load(scales + n, mask=mask_n, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, tl.trans(acc).to(out.dtype.element_ty), mask=(m < M)[:, None] & mask_n[None, :])


@triton.jit
def _widen(
    weight,
    scales,
    out,
    N,
    K,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Dequantises values, in their order of columns, with one program per (group of 128 columns, rows)."""
    group = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < N)[:, None]
    place = tl.arange(0, 64)[None, :]
    target = out + n.to(tl.int64)[:, None] * K + group * 128 + place
    if GROUPED:
        parameters = tl.load(scales + group * N + n, mask=n < N, other=0)
        scale = _half_scale(parameters)[:, None]
    else:
        scale = tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    if BITS == 4:
        both = tl.load(weight + n.to(tl.int64)[:, None] * (K // 2) + group * 64 + place, mask=mask, other=0)
        zeros = (parameters >> 16)[:, None]
        lower = ((both & 15).to(tl.int32) - zeros).to(tl.float32)
        upper = ((both >> 4).to(tl.int32) - zeros).to(tl.float32)
    else:
        source = weight + n.to(tl.int64)[:, None] * K + group * 128 + place
        lower = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        upper = tl.load(source + 64, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (lower * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(target + 64, (upper * scale).to(out.dtype.element_ty), mask=mask)


def widened(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises to [N, padded K] in a dtype, columns in the order of the values."""
    n, width = weight.shape[0], cdiv(weight.k, GROUP) * GROUP
    out = torch.empty((n, width), dtype=dtype, device=weight.values.device)
    _widen[(width // GROUP, cdiv(n, 64))](
        weight.values, weight.scales, out, n, width, BITS=weight.bits, GROUPED=weight.is_grouped, BLOCK_N=64
    )  # fmt: skip
    return out


@triton.jit
def _scale_sums(sums, x_scales, scales, bias, out, N, out_stride, BLOCK: tl.constexpr):
    """Multiplies integer sums by both scales, and adds the bias, with one program per (row, block of N)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    total = tl.load(sums + row * N + n, mask=mask, other=0).to(tl.float32)
    total *= tl.load(scales + n, mask=mask, other=0.0) * tl.load(x_scales + row)
    if bias is not None:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), mask=mask)


def _scaled_sums(
    sums: torch.Tensor,
    x_scales: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Converts int32 sums [M, N] to the product in `out`."""
    m, n = sums.shape
    _scale_sums[(m, cdiv(n, 1024))](sums, x_scales, scales, bias, out, n, out.stride(0), BLOCK=1024, num_warps=4)
    return out


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    *,
    scaled_mm: bool = False,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x [M, K] @ weight.T + bias: [M, N], in x's dtype, in `out` if given.

    It is W8A8 for more than 64 rows of integers with `int8_activations`, and for FP8 if `scaled_mm` (the result of
    `KernelPolicy.uses_scaled_mm`); otherwise activations keep their dtype.
    """
    m, n = x.shape[0], weight.shape[0]
    if scaled_mm:
        values, x_scales = reordered(x, weight, to=torch.float8_e4m3fn)
        made = torch._scaled_mm(
            values,
            weight.values.t(),
            scale_a=x_scales,
            scale_b=weight.scales.view(1, n),
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return made if out is None else out.copy_(made)
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not m:
        return out
    if m > _W8A8_M and _has_int_mm(weight):
        values, x_scales = reordered(x, weight, to=torch.int8)
        return _scaled_sums(torch._int_mm(values, weight.values.t()), x_scales, weight.scales, bias, out)
    values = reordered(x, weight)[0]
    if m > _REGISTER_M:
        torch.mm(values, widened(weight, x.dtype).t(), out=out)
        return out if bias is None else out.add_(bias)
    # Without tensor cores, in fp32, larger tiles do not fit the registers.
    block_m = min(32 if x.dtype == torch.float32 else 128, max(16, next_power_of_2(m)))
    few = block_m <= 64
    block_n = 64 if few or x.dtype == torch.float32 else 128
    _quantized_gemm[(cdiv(n, block_n), cdiv(m, block_m))](
        values,
        weight.values,
        weight.scales,
        bias,
        out,
        m,
        n,
        values.shape[1],
        values.stride(0),
        weight.values.stride(0),
        out.stride(0),
        BITS=weight.bits,
        GROUPED=weight.is_grouped,
        BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4 if few else 8,
        num_stages=3 if few and x.dtype != torch.float32 else 2,
    )
    return out


def _has_int_mm(weight: QuantizedWeight) -> bool:
    """True if activations may be rounded to int8, and torch multiplies such integers: N in steps of 8."""
    return weight.int8_activations and weight.format == "int8" and weight.shape[0] % 8 == 0
