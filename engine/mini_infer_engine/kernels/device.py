"""What the kernels must know of the device that they run on."""

import functools

import torch
import triton
from triton.runtime import driver


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """The most that one program may have: 227 KB on an H100 or H200, 99 KB on an L4; no limit under the interpreter."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    limit: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return limit


@functools.cache
def supports_gluon(device: torch.device) -> bool:
    """Whether it is Hopper, and Triton has the Gluon that our kernels for Hopper are written in."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return str(triton.__version__).startswith("3.6.")  # Gluon is experimental: a wrong barrier would hang
