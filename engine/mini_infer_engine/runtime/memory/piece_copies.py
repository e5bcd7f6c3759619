"""Copies many pieces of memory by one call of CUDA's driver: torch takes 5 us of the host's time for each.

It uses cuMemcpyBatchAsync of CUDA's driver API, which drivers have from CUDA 12.8 on, and a call for each piece with
older ones. The copy engines move pieces between a GPU and pinned memory, without a kernel.
"""

import ctypes
import logging
from typing import NamedTuple

import numpy as np

from mini_infer_engine.kv_transfer.cuda_driver import CudaError, Driver

log = logging.getLogger(__name__)

_IN_STREAM_ORDER = 1
"""Value of CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream has come to the copy."""


class Pieces(NamedTuple):
    """Pieces of memory on a GPU and their places in pinned memory."""

    on_device: np.ndarray  # [pieces] uint64, addresses
    on_host: np.ndarray  # [pieces] uint64, addresses
    sizes: np.ndarray  # [pieces] uint64, bytes

    def part(self, begin: int, end: int, count: int) -> "Pieces":
        """Returns the parts from `begin` to `end` of each piece, which has `count` equal parts."""
        first, last = (self.sizes // np.uint64(count) * np.uint64(place) for place in (begin, end))
        return Pieces(self.on_device + first, self.on_host + first, last - first)


class _Attributes(ctypes.Structure):
    """A CUmemcpyAttributes. Both locations are hints for managed memory, which there is none of."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class PieceCopies:
    """Copies on any stream of one GPU."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._attributes = _Attributes(source_access_order=_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # the piece from which on the attributes hold
        self._in_batches = True

    def to_device(self, pieces: Pieces, stream: int) -> None:
        """Begins to copy from pinned memory. Raises CudaError if that fails."""
        self._copy(pieces.on_device, pieces.on_host, pieces.sizes, stream)

    def to_host(self, pieces: Pieces, stream: int) -> None:
        """Begins to copy from the GPU. Raises CudaError if that fails."""
        self._copy(pieces.on_host, pieces.on_device, pieces.sizes, stream)

    def _copy(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        if not len(sizes):
            return
        if self._in_batches:
            try:
                self._copy_batch(targets, sources, sizes, stream)
                return
            except CudaError as error:
                log.warning("pages are copied one by one from now on: %s", error)
                self._in_batches = False
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._driver.call("cuMemcpyAsync", *map(ctypes.c_uint64, (target, source, size, stream)))

    def _copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        failed = ctypes.c_size_t()
        self._driver.call(
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(numbers.ctypes.data) for numbers in (targets, sources, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
