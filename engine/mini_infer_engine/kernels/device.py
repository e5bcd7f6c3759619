"""What the kernels must know of the device that they run on."""

import functools

import torch
from triton.runtime import driver


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """The most that one program may have: 227 KB on an H100 or H200, 99 KB on an L4; no limit under the interpreter."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    limit: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return limit
