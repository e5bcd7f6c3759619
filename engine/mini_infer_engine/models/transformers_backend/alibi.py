"""Computes ALiBi (Press et al. 2022, arXiv 2108.12409) by further dimensions of queries and keys.

The bias of a head is its slope times the key's position; the part that depends on the query's position alone vanishes
in the softmax. So it is a product of a query that has the slope and a key that has the position, and every attention
kernel computes it. Positions and slopes are split in two, each exact in 16 bits.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTH = 16
"""The further dimensions of each head, of which four are used: a multiple that all kernels take."""
_STEP = 256
"""Positions are split into a multiple of it and a rest, which bf16 has exactly up to 65,536."""


def slopes_of(slopes: Tensor, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the further dimensions [heads, WIDTH] of queries: slopes as products with `scale` need them."""
    exact = (slopes.double() / scale).to(device)
    high = exact.to(dtype)
    low = (exact - high.double()).to(dtype)
    return pad(torch.stack([high * _STEP, low * _STEP, high, low], dim=1), (0, WIDTH - 4))


def positions_of(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the further dimensions [tokens, WIDTH] of keys."""
    multiple, rest = positions // _STEP, positions % _STEP
    return pad(torch.stack([multiple, multiple, rest, rest], dim=1).to(dtype), (0, WIDTH - 4))
