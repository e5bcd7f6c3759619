"""Pages copied by one launch against copies one by one."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.copy_pages import copy_pages
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, normal

pytestmark = KERNELS


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    cases([((7, 2, 2, 16, 2, 8), FP32), ((5, 1, 1, 16, 1, 24), FP32)], [((40, 28, 2, 128, 8, 128), BF16)]),
)
def test_first_tokens_of_each_page_are_copied(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    pages = normal(*sizes, dtype=dtype)
    page_size = sizes[3]
    copies = [(0, 2, 1), (1, 3, page_size), (0, 4, page_size - 3)]
    expected = pages.clone()
    for source, target, tokens in copies:
        expected[target, :, :, :tokens] = expected[source, :, :, :tokens]
    copy_pages(pages, torch.tensor(copies, dtype=torch.int32, device=DEVICE))
    assert torch.equal(pages, expected)
