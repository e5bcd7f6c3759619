"""What a tensor-parallel rank hands to a sum: one summand, or those of splits of K, where they are written to peers."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.ops.triton_ops import TritonOps
from tests.gpu.device import FP32, KERNELS, POLICY, WORKSPACE, error, normal
from tests.gpu.exact import exact_norm

pytestmark = KERNELS


class Twins:
    """Collectives and peers of two ranks that have the same summands."""

    def __init__(self) -> None:
        self.peers, self.parallel = self, None
        self.seen: list[int] = []

    def pushes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """As peer memory does."""
        return rows <= 256

    def can_sum(self, summands: torch.Tensor) -> bool:
        """As peer memory does."""
        return summands.shape[-2] <= 256

    def summand(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Too much for one shot."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Of both."""
        return 2 * x

    def sum_add_norm(self, summands: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        """Of both."""
        self.seen.append(summands.shape[0] if summands.dim() == 3 else 1)
        residual += 2 * summands.view(-1, *residual.shape).sum(0)
        return exact_norm(residual, weight, eps).to(residual.dtype)


@pytest.mark.parametrize(("rows", "splits"), [(100, 4), (200, 2), (20, 1), (300, 0)])
def test_products_of_many_rows_are_handed_on_split(rows: int, splits: int) -> None:
    k, n = 2048, 3584 if splits == 2 else 256
    linear, twins = Linear(k, n, columns=Shard(2 * k, ((0, k),))), Twins()
    linear.weight.data, linear.weight.requires_grad = normal(n, k) / k**0.5, False
    norm = RMSNorm(n, 1e-6)
    norm.weight.data = normal(n, seed=3)
    x, residual = normal(rows, k, seed=1), normal(rows, n, seed=2)
    exact = residual.double() + 2 * x.double() @ linear.weight.double().t()
    ops: Any = TritonOps(KernelContext(POLICY, WORKSPACE), twins)  # type: ignore[arg-type]  # what is used of them
    state = ops.linear_add_norm(x, linear, ResidualState(residual), norm)
    assert twins.seen == ([splits] if splits else [])
    assert error(state.residual, exact) < 64
    assert error(ops.norm(state, norm), exact_norm(exact.to(FP32), norm.weight, 1e-6)) < 64
