"""Copies rows with a stride by a GPU's copy engines: one call for many rows, where torch makes one call for each.

It uses cuMemcpy2DAsync of CUDA's driver API; torch would first gather such rows by a kernel.
"""

import ctypes
from typing import Any

from mini_infer_engine.kv_transfer.cuda_driver import Driver

_UNIFIED = 4
"""Value of CU_MEMORYTYPE_UNIFIED: the driver infers from an address where it is."""


class _Side(ctypes.Structure):
    """One of the two sides of a CUDA_MEMCPY2D."""

    _fields_ = (
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("memory_type", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch_bytes", ctypes.c_size_t),
    )


class _Copy2D(ctypes.Structure):
    _fields_ = (("source", _Side), ("target", _Side), ("width_bytes", ctypes.c_size_t), ("height", ctypes.c_size_t))


def copy_rows(driver: Driver, target: Any, source: Any, stream: int) -> None:
    """Begins to copy between tensors [rows, n] whose rows are dense, on the GPU or in pinned memory. Raises CudaError
    if that fails.
    """
    width = source.shape[1] * source.element_size()
    sides = [
        _Side(
            memory_type=_UNIFIED,
            device=tensor.data_ptr(),
            pitch_bytes=max(width, tensor.stride(0) * tensor.element_size()),  # of one row the stride says nothing
        )
        for tensor in (source, target)
    ]
    driver.call("cuMemcpy2DAsync_v2", ctypes.byref(_Copy2D(*sides, width, source.shape[0])), ctypes.c_void_p(stream))
