"""Rounds and widens keys and values of one byte an element in Triton, and finds their scales.

The arithmetic is that of `runtime.kv_rows`, the layout that of `runtime.quantized_pool`. Attention computes with values
before scaling, in fp16, which represents e4m3 and 8-bit integers exactly. Scores are multiplied by the scales of keys,
probabilities by those of values.
"""

import os

import triton
import triton.language as tl

_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-100)
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to an fp32 number and subtracting it again rounds to the nearest integer, ties to even."""
VALUE_UNIT: tl.constexpr = tl.constexpr(256.0)
"""The factor of probabilities times scales of values, by which accumulators are multiplied.

Without it they would be too small for fp16. It is a power of two, so that it costs nothing.
"""
_INLINE_PTX: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""True if inline PTX may be used: Triton's interpreter does not support it."""


@triton.jit
def row_scales(x, LARGEST: tl.constexpr):
    """Returns the scales of rows [rows, elements] in fp32: [rows] fp32, which are bfloat16 numbers."""
    bits = (tl.max(tl.abs(x), axis=1) * (1 / LARGEST)).to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True), _SMALLEST_SCALE)


@triton.jit
def rounded_rows(x, scales, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Rounds rows to the pages' dtype."""
    x = tl.div_rn(x, scales[:, None])
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if dtype == tl.int8:
        x = (x + _ROUNDER) - _ROUNDER
    return x.to(dtype)


@triton.jit
def first_scale(pool, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Returns a pointer to the bfloat16 scale of a KV head's keys in the first page.

    Strides of pages and halves are half as many in bfloat16.
    """
    behind_values = pool + PAGE_SIZE * KV_HEADS * HEAD_DIM
    return behind_values.to(tl.pointer_type(tl.bfloat16)) + kv_head * PAGE_SIZE


@triton.jit
def unit_rows(x, dtype: tl.constexpr):
    """Divides rows [rows, elements] by their largest elements; returns them in the products' dtype, and fp32 divisors.

    Queries are divided so that they fit into fp16 whatever their size.
    """
    wide = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), _SMALLEST_SCALE)
    return (wide / largest[:, None]).to(dtype), largest


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Converts elements to the dtype of products.

    An 8-bit integer u in the low byte of the fp16 number 1024 makes 1024 + u, without a conversion, which is slow.
    """
    if _INLINE_PTX and dtype == tl.float16 and x.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, bias;
            xor.b32 u, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, u, 0x64646464, 0x4140;
            prmt.b32 $1, u, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return x.to(dtype)


@triton.jit
def widened_pairs(x, kv_dtype: tl.constexpr, dtype: tl.constexpr):
    """Splits int16 numbers into the first and the second elements of pairs: two tensors in the dtype of products.

    Shared memory provides a product's transposed right operand in pieces of 16 bits, never of 8: neighbouring elements
    come together, and belong to two products.
    """
    if _INLINE_PTX and dtype == tl.float16 and kv_dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, bias;
            xor.b32 u, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, u, 0x64646464, 0x4240;
            prmt.b32 $1, u, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    if _INLINE_PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    first = x.to(tl.int8).to(kv_dtype, bitcast=True).to(dtype)
    return first, (x >> 8).to(tl.int8).to(kv_dtype, bitcast=True).to(dtype)


@triton.jit
def unpacked_scales(x, TOKENS: tl.constexpr):
    """Unpacks scales [TOKENS] in fp32 from int32 numbers, two in each: `cp.async` copies no less than four bytes."""
    first, second = (x << 16).to(tl.float32, bitcast=True), (x & -0x10000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(first, second), (TOKENS,))
