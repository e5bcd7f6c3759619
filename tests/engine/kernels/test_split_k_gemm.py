"""Split-K for cuBLAS: for which shapes, and that the splits add up to the product."""

import pytest
import torch

from mini_infer_engine.kernels.gemm.gemm_rules import k_splits
from mini_infer_engine.kernels.gemm.split_k_gemm import split_k_gemm
from tests.engine.kernels.profiles import H200


@pytest.mark.parametrize(
    ("m", "n", "k", "splits"),
    [
        (128, 1024, 3072, 4),
        (65, 1024, 3072, 4),
        (64, 1024, 3072, 1),  # small-M GEMMs are our own kernels'
        (512, 1536, 8960, 2),
        (384, 1536, 8960, 4),
        (384, 3584, 18944, 2),
        (512, 3584, 18944, 1),  # 112 tiles for 132 SMs
        (576, 3584, 18944, 2),  # 140 tiles: a second wave for eight of them
        (8192, 3584, 18944, 1),
        (128, 1024, 640, 1),  # splits would be too narrow
        (128, 1024, 2049, 1),  # no equal ones
        (128, 1024, 2052, 1),  # rows of a split would not begin at 16 bytes
    ],
)
def test_split_k_count_by_shape(m: int, n: int, k: int, splits: int) -> None:
    assert k_splits(m, n, k, profile=H200) == splits


def test_split_k_partial_sums_add_up_to_the_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator, dtype=torch.float64) for rows in (5, 7))
    summands = split_k_gemm(x, weight, 4)
    assert summands.shape == (4, 5, 7)
    torch.testing.assert_close(summands.sum(0), x @ weight.T)
    torch.testing.assert_close(summands[1], x[:, 16:32] @ weight[:, 16:32].T)
