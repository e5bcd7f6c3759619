"""Widens quantised values to the left operand of wgmma in registers, bf16 over a unit: for Gluon kernels on Hopper.

A few instructions for a pair put the values into bf16's bits. The remaining factor, a power of two, is multiplied into
the sums or the scales: `unit_of`. Values are in the order of `quantized_weight`, so that registers only change names.
(Frantar et al. 2024, Marlin, arXiv 2408.11743; Kim et al. 2022, arXiv 2211.10017.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INT8 = gl.constexpr(
    """
    {
    .reg .b32 low, high, scale, offset;
    mov.b32 scale, 0x7F007F00;
    mov.b32 offset, 0xC000C000;
    lop3.b32 low, $2, 0x00FF00FF, 0x00800080, 0x6A;
    fma.rn.bf16x2 $0, low, scale, offset;
    prmt.b32 high, $2, 0, 0x4341;
    xor.b32 high, high, 0x00800080;
    fma.rn.bf16x2 $1, high, scale, offset;
    }
    """
)
"""Converts four signed bytes to bf16 over 64; bytes 0 and 2 share a register.

The low eight bits of a bf16 are an integer times 2 ** -133, because subnormal numbers and those with the least exponent
are equally far apart. One instruction puts the byte plus 128 there, and a multiplication by 2 ** 127, less 2, is exact.
"""
NIBBLES = gl.constexpr(
    """
    {
    .reg .b32 word, low, high;
    mov.b32 low, 0x7F007F00;
    mov.b32 high, 0x7D007D00;
    and.b32 $0, $4, 0x000F000F;
    and.b32 $1, $4, 0x00F000F0;
    shr.b32 word, $4, 8;
    and.b32 $2, word, 0x000F000F;
    and.b32 $3, word, 0x00F000F0;
    fma.rn.bf16x2 $0, $0, low, $5;
    fma.rn.bf16x2 $1, $1, high, $5;
    fma.rn.bf16x2 $2, $2, low, $6;
    fma.rn.bf16x2 $3, $3, high, $6;
    }
    """
)
"""Converts a word's eight integers to bf16 over 64, plus an offset for each row, in the same way as INT8.

The upper four bits are sixteen times as large, which their multiplication takes back. Integers i and i + 4 of the word
share a register.
"""
FP8 = gl.constexpr(
    """
    {
    .reg .b32 word, number;
    shl.b32 word, $2, 8;
    and.b32 number, $2, 0x007F007F;
    shl.b32 number, number, 4;
    lop3.b32 $0, word, 0x80008000, number, 0xEA;
    shr.b32 number, $2, 4;
    and.b32 number, number, 0x07F007F0;
    lop3.b32 $1, $2, 0x80008000, number, 0xEA;
    }
    """
)
"""Converts four e4m3 numbers to bf16 over 2 ** 120; bytes 0 and 2 share a register.

Exponent and mantissa are moved to bf16's places. The unit is the difference of the exponents' biases. Subnormal numbers
are correct, too, because wgmma reads bf16's.
"""


@gluon.constexpr_function
def unit_of(dtype):
    """Returns the divisor that widening applies to values of this type."""
    return 1.0 if dtype.primitive_bitwidth == 16 else 2.0**120 if dtype == gl.float8e4nv else 64.0


@gluon.jit
def widened_bytes(values, scales=None):
    """Widens 64 columns of 8-bit values, ordered by `quantized_weight.interleaved`, to [rows, 64] bf16 over their unit.

    `scales`: bf16, one for each row; they multiply before columns change their names, and with them the layout.
    """
    rows: gl.constexpr = values.shape[0]
    conversion: gl.constexpr = INT8 if values.dtype == gl.int8 else FP8
    wide = gl.inline_asm_elementwise(conversion, "=&r,=&r,r", [values], gl.bfloat16, is_pure=True, pack=4)
    if scales is not None:
        wide = wide * scales[:, None]
    # Row; thread, step of 16 columns, upper 8, odd.
    steps = gl.permute(gl.reshape(wide, [rows, 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    return gl.reshape(steps, [rows, 64])


@gluon.jit
def offsets_of(parameters):
    """Returns the offsets of NIBBLES for the zero points of `quantized_weight.packed_parameters`."""
    return ((parameters >> 16).to(gl.float32) * (-1.0 / 64)).to(gl.bfloat16)


@gluon.jit
def in_columns(low, high):
    """Arranges both integers of each byte of `quantized_weight.packed_nibbles` as two halves [rows, 64]."""
    rows: gl.constexpr = low.shape[0]
    # Row; thread, half, word, high and low bit of the byte in it; lower or higher half of the word's bytes.
    both = gl.reshape(gl.join(low, high), [rows, 4, 2, 2, 2, 2, 2])
    return gl.split(gl.reshape(gl.permute(both, (0, 3, 6, 4, 1, 5, 2)), [rows, 64, 2]))


@gluon.jit
def scale_of(parameters):
    """Converts scales to fp32, from fp32 or from fp16 in the low half of a word."""
    if parameters.dtype == gl.float32:
        found = parameters
    else:
        found = parameters.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return found
