"""Products in shares of K: for which shapes, and that the shares make up the product."""

import pytest
import torch

from mini_infer_engine.kernels.gemm.split_k_gemm import k_splits, split_k_gemm


@pytest.mark.parametrize(
    ("rows", "columns", "width", "splits"),
    [
        (128, 1024, 3072, 4),
        (65, 1024, 3072, 4),
        (64, 1024, 3072, 1),  # products of few rows are our own
        (512, 1536, 8960, 2),
        (384, 1536, 8960, 4),
        (384, 3584, 18944, 2),
        (512, 3584, 18944, 1),  # 112 tiles for 132 multiprocessors
        (576, 3584, 18944, 2),  # 140 tiles: a second turn for eight of them
        (8192, 3584, 18944, 1),
        (128, 1024, 640, 1),  # shares would be too narrow
        (128, 1024, 2049, 1),  # no equal ones
        (128, 1024, 2052, 1),  # rows of a share would not begin at 16 bytes
    ],
)
def test_how_many_shares(rows: int, columns: int, width: int, splits: int) -> None:
    assert k_splits(rows, columns, width) == splits


def test_shares_add_up_to_the_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator, dtype=torch.float64) for rows in (5, 7))
    summands = split_k_gemm(x, weight, 4)
    assert summands.shape == (4, 5, 7)
    torch.testing.assert_close(summands.sum(0), x @ weight.T)
    torch.testing.assert_close(summands[1], x[:, 16:32] @ weight[:, 16:32].T)
