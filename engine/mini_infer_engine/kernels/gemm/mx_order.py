"""The order of MXFP4 weights in which `mx_experts` reads them: a group of 32 columns is 16 bytes, four 32-bit words.

Bytes b of a group hold column b and column b + 16, so that four bytes have columns 4w to 4w + 3 and 4w + 16 to 4w + 19.
Within a word's halves of 16 bits, the values that one step of the kernel yields are where its shift brings them to the
places of bf16: the sign at bit 15, the three other bits at 8 to 6.
"""

import torch
from torch import Tensor
from torch.nn import functional

GROUP_COLUMNS = 32
GROUP_BYTES = GROUP_COLUMNS // 2
_PLACES = ((0, 15, 6), (1, 12, 3), (2, 14, 9), (3, 13, 0))
"""Of each result of the kernel: its number, the place of the sign, and of the lowest of the other three bits.

Results 0 and 1 are columns 4w, 4w + 1 and 4w + 2, 4w + 3; results 2 and 3 those sixteen columns later. The first column
is in the lower half of the word.
"""


def mx_ordered(values: Tensor) -> Tensor:
    """Arranges E2M1 values, uint8 [..., K / 2], the earlier column in the low half of a byte; 32 divide K.

    The result has the shape of `values`.
    """
    return torch.cat([_ordered(rows) for rows in values.flatten(0, -2).split(1 << 14)]).view(values.shape)


def mx_scales(scales: Tensor) -> Tensor:
    """Pads the scales of a row, uint8 [..., groups], to a multiple of 16 bytes, so that rows are aligned."""
    return functional.pad(scales, (0, -scales.shape[-1] % 16))


def _ordered(values: Tensor) -> Tensor:
    columns = torch.stack((values & 15, values >> 4), dim=-1).view(len(values), -1, 2, 4, 2, 2).int()
    # Row, group, later 16 columns, word, result of two, half of the word.
    words = columns.new_zeros(len(values), columns.shape[1], 4, 2)
    for result, sign, rest in _PLACES:
        value = columns[:, :, result // 2, :, result % 2]
        words |= ((value >> 3) << sign) | ((value & 7) << rest)
    return words.to(torch.uint16).view(torch.uint8).view(values.shape)


def mx_unordered(values: Tensor) -> Tensor:
    """Returns the values in the checkpoint's order, two columns in a byte: the inverse of `mx_ordered`."""
    words = values.contiguous().view(torch.uint16).int().view(*values.shape[:-1], -1, 4, 2)
    found = [((words >> sign & 1) << 3) | (words >> rest & 7) for _, sign, rest in _PLACES]
    columns = torch.stack(found, dim=-2).unflatten(-2, (2, 2)).movedim(-3, -4)
    # ..., group, later 16 columns, word, result of two, half of the word.
    pairs = columns.flatten(-4).view(*values.shape, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)
