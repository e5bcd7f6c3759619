"""What CUDA's driver is told of a copy of rows, by a driver that does it in main memory."""

import ctypes
from typing import Any

import pytest
import torch

from mini_infer_engine.kv_transfer.staging.row_copies import copy_rows

WORD = 8
"""Bytes of a field of CUDA_MEMCPY2D, with what aligns it."""


class HostDriver:
    """Reads the fields where cuda.h has them."""

    def call(self, function: str, *arguments: Any) -> None:
        assert function == "cuMemcpy2DAsync_v2"
        structure, stream = arguments
        assert stream.value == 7
        raw = bytes(structure._obj)
        assert len(raw) == 16 * WORD
        fields = [int.from_bytes(raw[at : at + WORD], "little") for at in range(0, len(raw), WORD)]
        source, target, (width, height) = fields[:7], fields[7:14], fields[14:]
        for x_bytes, y, memory_type, host, _, array, pitch in (source, target):
            assert (x_bytes, y, memory_type & 0xFFFFFFFF, host, array) == (0, 0, 4, 0, 0)
            assert pitch >= width
        for row in range(height):
            ctypes.memmove(target[4] + row * target[6], source[4] + row * source[6], width)


@pytest.mark.parametrize("rows", [1, 3])
def test_strided_rows_are_copied_both_ways(rows: int) -> None:
    pool = torch.arange(8 * 5, dtype=torch.int64).view(8, 5)
    staged, back = torch.zeros((rows, 2), dtype=torch.int64), torch.zeros_like(pool)
    copy_rows(HostDriver(), staged, pool[2 : 2 + rows, 1:3], 7)
    assert torch.equal(staged, pool[2 : 2 + rows, 1:3])
    copy_rows(HostDriver(), back[4 : 4 + rows, 3:], staged, 7)
    assert torch.equal(back[4 : 4 + rows, 3:], staged)
    assert int(back.count_nonzero()) == staged.numel()
