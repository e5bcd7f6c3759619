"""Allocates the memory of caches: zeros, in main memory perhaps such as other processes can map."""

import math

import torch
from torch import Tensor

from mini_infer_engine.kv_transfer.transports.shared_memory import SharedArray
from mini_infer_engine.runtime.memory.zero_memory import zeros


def cache_memory(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_shared: bool
) -> tuple[Tensor, int | None]:
    """Returns zeros, and the file by which other processes map them: with `is_shared`, in main memory alone."""
    if not is_shared or device.type != "cpu":
        return zeros(sizes, dtype, device), None
    shared = SharedArray(math.prod(sizes) * dtype.itemsize)
    return torch.from_numpy(shared.bytes).view(dtype).view(sizes), shared.file
