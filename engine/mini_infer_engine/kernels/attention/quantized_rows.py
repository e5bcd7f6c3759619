"""Keys and values of one byte an element in Triton: how a token's head is rounded and widened, and where its scale is.

The arithmetic is `runtime.kv_rows`', the places are those of `runtime.quantized_pool`. Attention computes with values
less their scales, in fp16, which holds e4m3 and 8-bit integers exactly. Scores are multiplied by the scales of keys,
probabilities by those of values.
"""

import os

import triton
import triton.language as tl

_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-100)
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: an fp32 number to which it is added loses its fraction, to the nearest even integer."""
VALUE_UNIT: tl.constexpr = tl.constexpr(256.0)
"""Probabilities times scales of values, by which accumulators are multiplied, are that much larger: in fp16 they would
be too small. A power of two, so that it costs nothing."""
_INLINE_PTX: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Triton's interpreter knows none."""


@triton.jit
def row_scales(x, LARGEST: tl.constexpr):
    """Of rows [rows, elements] in fp32: [rows] fp32, which are bfloat16 numbers."""
    bits = (tl.max(tl.abs(x), axis=1) * (1 / LARGEST)).to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True), _SMALLEST_SCALE)


@triton.jit
def rounded_rows(x, scales, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Rows in the pages' dtype."""
    x = tl.div_rn(x, scales[:, None])
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if dtype == tl.int8:
        x = (x + _ROUNDER) - _ROUNDER
    return x.to(dtype)


@triton.jit
def first_scale(pool, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Of a KV head's keys in the first page, as a pointer to bfloat16; strides of pages and halves are half as many."""
    behind_values = pool + PAGE_SIZE * KV_HEADS * HEAD_DIM
    return behind_values.to(tl.pointer_type(tl.bfloat16)) + kv_head * PAGE_SIZE


@triton.jit
def unit_rows(x, dtype: tl.constexpr):
    """Rows [rows, elements] over the largest of each, in the dtype of products, and these [rows] in fp32.

    Queries are divided so that they fit into fp16 whatever their size.
    """
    wide = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), _SMALLEST_SCALE)
    return (wide / largest[:, None]).to(dtype), largest


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Elements in the dtype of products.

    An integer u of 8 bits in the low byte of the fp16 number 1024 makes 1024 + u: no conversion, which are slow.
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
    """Two tensors in the dtype of products, of the first and of the second elements of pairs, which int16 numbers are.

    Shared memory gives a product its right operand transposed in pieces of 16 bits, never of 8: elements that stand
    side by side come together, and belong to two products.
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
    """Scales [TOKENS] in fp32 of int32 numbers, two in each: `cp.async` copies no less than four bytes."""
    first, second = (x << 16).to(tl.float32, bitcast=True), (x & -0x10000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(first, second), (TOKENS,))
