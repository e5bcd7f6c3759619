"""Tests what CUDA's driver is told of copies of pieces, by a driver that does them in main memory."""

import ctypes
from typing import Any

import numpy as np
import pytest

from mini_infer_engine.kv_transfer.cuda_driver import CudaError
from mini_infer_engine.runtime.memory.piece_copies import PieceCopies, Pieces


class HostDriver:
    """Reads the arguments where cuda.h has them."""

    def __init__(self, *, has_batches: bool = True) -> None:
        self._has_batches, self.calls = has_batches, list[str]()

    def call(self, function: str, *arguments: Any) -> None:
        self.calls.append(function)
        if function == "cuMemcpyAsync":
            target, source, size, stream = (argument.value for argument in arguments)
            assert stream == 7
            ctypes.memmove(target, source, size)
            return
        assert function == "cuMemcpyBatchAsync"
        if not self._has_batches:
            raise CudaError("cuMemcpyBatchAsync: this driver lacks it")
        *lists, count, attributes, first, num_attributes, _, stream = arguments
        assert (count.value, num_attributes.value, stream.value) == (3, 1, 7)
        assert first._obj.value == 0
        raw = bytes(attributes._obj)
        assert [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)] == [1, 0, 0, 0, 0, 0]
        targets, sources, sizes = ((ctypes.c_uint64 * count.value).from_address(each.value) for each in lists)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)


@pytest.mark.parametrize("has_batches", [True, False])
def test_pieces_are_copied_both_ways_whether_the_driver_has_batches_or_not(has_batches: bool) -> None:
    device, host = np.arange(40, dtype=np.uint64), np.zeros(40, np.uint64)
    places = np.array([1, 9, 30], np.uint64)
    pieces = Pieces(
        device.ctypes.data + 8 * places, host.ctypes.data + 8 * places[::-1], np.array([8, 32, 48], np.uint64)
    )
    driver = HostDriver(has_batches=has_batches)
    copies = PieceCopies(driver)
    copies.to_host(pieces, 7)
    assert host[30] == 1
    assert host[9:13].tolist() == [9, 10, 11, 12]
    assert host[1:7].tolist() == [30, 31, 32, 33, 34, 35]
    assert np.count_nonzero(host) == 11
    device[:] = 0
    copies.to_device(pieces, 7)
    assert device[[1, 9, 10, 11, 12]].tolist() == [1, 9, 10, 11, 12]
    assert device[30:36].tolist() == [30, 31, 32, 33, 34, 35]
    once = ["cuMemcpyAsync"] * 3
    assert driver.calls == (["cuMemcpyBatchAsync"] * 2 if has_batches else ["cuMemcpyBatchAsync", *once, *once])
    copies.to_device(Pieces(*(numbers[:0] for numbers in pieces)), 7)
    assert len(driver.calls) == (2 if has_batches else 7), "nothing is nothing to copy"


def test_error_of_a_piece_reaches_the_caller() -> None:
    class Failing(HostDriver):
        def call(self, function: str, *arguments: Any) -> None:
            raise CudaError(f"{function}: CUDA_ERROR_INVALID_VALUE")

    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        PieceCopies(Failing()).to_host(Pieces(*(np.ones(1, np.uint64) for _ in range(3))), 7)


def test_parts_of_pieces_are_equal_shares_of_each() -> None:
    pieces = Pieces(*(np.array(numbers, np.uint64) for numbers in ([100, 1000], [5000, 9000], [24, 48])))
    parts = [pieces.part(*part, 6) for part in ((0, 1), (1, 4), (4, 6))]
    assert [part.on_device.tolist() for part in parts] == [[100, 1000], [104, 1008], [116, 1032]]
    assert [part.on_host.tolist() for part in parts] == [[5000, 9000], [5004, 9008], [5016, 9032]]
    assert [part.sizes.tolist() for part in parts] == [[4, 8], [12, 24], [8, 16]]
