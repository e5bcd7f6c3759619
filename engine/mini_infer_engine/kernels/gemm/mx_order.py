"""The order of MXFP4 weights in which `moe.mx_experts` reads them: a group of 32 columns is eight words of 16 bits.

Word j of a group holds columns j, j + 8, j + 16 and j + 24. Each is where a shift of the kernel brings it to bf16's
places: the sign to bit 15, and the three other bits to bits 8 to 6.

A block of 8 rows and 128 columns is contiguous, and the blocks of 8 rows follow each other: whoever multiplies a few
rows reads memory in order. Pieces of 64 bytes, a row's distance apart, had 2.7 TB/s of an H200's 4.8.
"""

import torch
from torch import Tensor
from torch.nn import functional

GROUP_COLUMNS = 32
GROUP_WORDS = GROUP_COLUMNS // 4
BLOCK_ROWS, BLOCK_GROUPS = 8, 4
_PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))
"""For each of a word's four columns the place of its sign, and of the lowest of its other bits."""
_EXPONENT_STEPS = 100
_LEAST_EXPONENT, _LARGEST_EXPONENT = 128 - _EXPONENT_STEPS, 254 - _EXPONENT_STEPS
FACTOR_OF_SCALE = 2.0**_EXPONENT_STEPS
VALUE_UNIT = 2.0**126
"""Values are widened to their 2 ** -126th part, of which factors undo what they can without an overflow."""


def mx_ordered(values: Tensor) -> Tensor:
    """Arranges E2M1 values, uint8 [..., N, K / 2], the earlier column in the low half of a byte; 32 divide K, 8 N.

    The result is [..., N, K / 2] with K padded to 128.
    """
    words = torch.cat([_ordered(rows) for rows in values.flatten(0, -2).split(1 << 14)]).view(values.shape)
    return _in_blocks(words, BLOCK_GROUPS * GROUP_COLUMNS // 2)


def mx_scales(scales: Tensor) -> Tensor:
    """Returns factors of widened values, bf16 [..., N, groups], from exponents (E8M0), uint8, in blocks of 8 rows and 4
    groups; groups are padded.

    A factor is the scale times `FACTOR_OF_SCALE`. Scales between 2 ** -99 and 2 ** 27 are exact; others are limited.
    """
    bits = (scales.to(torch.int16).clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT) + _EXPONENT_STEPS) << 7
    return _in_blocks(bits.view(torch.bfloat16), BLOCK_GROUPS)


def _in_blocks(rows: Tensor, columns: int) -> Tensor:
    padded = functional.pad(rows, (0, -rows.shape[-1] % columns))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, BLOCK_ROWS)).transpose(-3, -2)
    return blocks.reshape(padded.shape)


def _out_of_blocks(blocks: Tensor, columns: int) -> Tensor:
    steps = blocks.shape[-1] // columns
    of_rows = blocks.unflatten(-2, (-1, BLOCK_ROWS)).flatten(-2).unflatten(-1, (steps, BLOCK_ROWS, columns))
    return of_rows.transpose(-3, -2).reshape(blocks.shape)


def _ordered(values: Tensor) -> Tensor:
    columns = torch.stack((values & 15, values >> 4), dim=-1).view(len(values), -1, 4, GROUP_WORDS).int()
    words = torch.zeros_like(columns[:, :, 0])
    for number, (sign, rest) in enumerate(_PLACES):
        value = columns[:, :, number]
        words |= ((value >> 3) << sign) | ((value & 7) << rest)
    return words.to(torch.uint16).view(torch.uint8).view(values.shape)


def mx_unordered(values: Tensor) -> Tensor:
    """Returns the values in the checkpoint's order, two columns in a byte, padded: the inverse of `mx_ordered`."""
    rows = _out_of_blocks(values, BLOCK_GROUPS * GROUP_COLUMNS // 2)
    words = rows.contiguous().view(torch.uint16).int().unflatten(-1, (-1, GROUP_WORDS))
    found = [((words >> sign & 1) << 3) | (words >> rest & 7) for sign, rest in _PLACES]
    pairs = torch.stack(found, dim=-2).view(*rows.shape, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


def mx_scales_of_rows(scales: Tensor) -> Tensor:
    """Returns the scales of `mx_scales` as fp32 in the checkpoint's order, padded."""
    return _out_of_blocks(scales, BLOCK_GROUPS).float() / FACTOR_OF_SCALE
