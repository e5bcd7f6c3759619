"""Rows of hidden states that kernels store and read against those of plain torch."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.hidden_rows import read_rows, store_decoded_rows, store_rows
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages, decode_index
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, normal

pytestmark = KERNELS

PAGE_SIZE = 16
SIZES = cases([(8, FP32), (2056, FP32)], [(7168, BF16)])


def filled(width: int, dtype: torch.dtype) -> HiddenPages:
    pages = HiddenPages(6, PAGE_SIZE, width, dtype, DEVICE)
    pages.pages.copy_(normal(7, PAGE_SIZE, width, dtype=dtype, seed=3))
    return pages


@pytest.mark.parametrize(("width", "dtype"), SIZES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_are_stored_and_read_at_their_places(width: int, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    expected, pages = filled(width, dtype), filled(width, dtype)
    index = torch.tensor([3, -1, 95, 0, 17], dtype=index_dtype, device=DEVICE)
    states = normal(5, width, dtype=dtype)
    expected.write(index, states)
    store_rows(pages.rows, index, states)
    assert torch.equal(pages.pages[:6], expected.pages[:6])
    assert torch.equal(read_rows(pages.rows, index), expected.read(index))
    assert not read_rows(pages.rows, index)[1].any()


@pytest.mark.parametrize(("width", "dtype"), SIZES)
def test_decoded_rows_are_stored_behind_the_cached_tokens(width: int, dtype: torch.dtype) -> None:
    expected, pages = filled(width, dtype), filled(width, dtype)
    table = torch.tensor([[3, 1], [0, 4], [5, 2], [6, 6]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, 0, 2, 3], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([PAGE_SIZE + 2, 7, -1, 40], device=DEVICE)  # the last one is behind its table
    states = normal(4, width, dtype=dtype)
    expected.write(decode_index(table, slots, lengths, PAGE_SIZE)[:3], states[:3])
    store_decoded_rows(pages.rows, table, slots, lengths, states, PAGE_SIZE)
    assert torch.equal(pages.pages[:6], expected.pages[:6])
