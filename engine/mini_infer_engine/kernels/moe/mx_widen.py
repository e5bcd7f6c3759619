"""Widens MXFP4 values in the order of `gemm.mx_order` to bf16, in registers.

A word of 16 bits has four values, of which a few instructions for two words yield each as bf16 over 2 ** 126: E2M1's
three lower bits are the lowest of bf16's exponent and the highest of its fraction, and subnormal numbers agree, too.
One multiplication by the group's scale follows.
(Frantar et al. 2024, Marlin, arXiv 2408.11743, arranges integers for such a purpose.)
"""

import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.mx_order import GROUP_WORDS

_WIDEN: tl.constexpr = tl.constexpr(
    """
    {
    .reg .b32 sign, number;
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 number, $4, 3;
    and.b32 $1, number, 0x81C081C0;
    shr.u32 number, $4, 3;
    and.b32 number, number, 0x01C001C0;
    shl.b32 sign, $4, 1;
    lop3.b32 $2, sign, 0x80008000, number, 0xEA;
    shl.b32 number, $4, 6;
    and.b32 number, number, 0x01C001C0;
    shl.b32 sign, $4, 2;
    lop3.b32 $3, sign, 0x80008000, number, 0xEA;
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $5;
    mul.rn.bf16x2 $2, $2, $5;
    mul.rn.bf16x2 $3, $3, $5;
    }
    """
)
"""Widens the values of two words of `mx_order` and multiplies them by the scales of their groups: the words' first
values, their second ones, and so on.
"""
_WORDS: tl.constexpr = tl.constexpr(GROUP_WORDS)


@triton.jit
def widened_words(packed, factors, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Returns the values of words [ROWS, WORDS], times the factors of their groups [ROWS, WORDS / GROUP_WORDS], as bf16
    [ROWS, 4 * WORDS] in the order of columns.

    A thread has the same two words of a group, and so the columns that wgmma wants of it.
    """
    factors = tl.broadcast_to(factors[:, :, None], (ROWS, WORDS // _WORDS, _WORDS))
    w0, w1, w2, w3 = tl.inline_asm_elementwise(
        _WIDEN,
        "=&r,=&r,=&r,=&r,r,r",
        [packed, tl.reshape(factors, (ROWS, WORDS))],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
    four = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # the last two axes: the low and the high bit of a value's place
    four = tl.reshape(four, (ROWS, WORDS // _WORDS, _WORDS, 2, 2))
    return tl.reshape(tl.permute(four, (0, 1, 4, 3, 2)), (ROWS, 4 * WORDS))
