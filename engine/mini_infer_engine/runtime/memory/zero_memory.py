"""Allocates memory of zeros for caches. On a CPU only what is used of it takes memory."""

import math

import numpy as np
import torch
from torch import Tensor


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros, because attention multiplies masked values by 0 and 0 * NaN is NaN."""
    if device.type != "cpu" or not math.prod(sizes):
        return torch.zeros(sizes, dtype=dtype, device=device)
    # numpy has the kernel map zero pages, so that a pool costs memory only where it is used; torch.zeros writes all.
    raw = np.zeros(math.prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(sizes)
