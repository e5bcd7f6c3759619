"""GPTQ's columns by kernels: the integers that torch finds."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels import round_columns
from mini_infer_engine.quantization import gptq
from tests.gpu.device import DEVICE, KERNELS, cases, normal

pytestmark = KERNELS
_LARGEST = 15


def block(rows: int, columns: int, width: int) -> list[torch.Tensor]:
    """The first `columns` of weights, scales, zero points and integers of `width` columns."""
    weight, scale = normal(rows, width), normal(rows, width, seed=1).abs() * 0.1 + 0.02
    zero = (normal(rows, width, seed=2) * 3 + 8).round().clamp(0, _LARGEST)
    return [one[:, :columns] for one in (weight, scale, zero, torch.zeros_like(weight))]


@pytest.mark.parametrize(
    ("rows", "columns", "width"), cases([(3, 16, 16), (37, 24, 40)], [(500, 128, 384), (4096, 128, 4096)])
)
def test_columns_are_rounded_as_torch_rounds_them(rows: int, columns: int, width: int) -> None:
    left, scale, zero, integers = block(rows, columns, width)
    factors = normal(width, width, seed=3).triu_()[:columns, :columns] * 0.1
    factors.diagonal().fill_(0.7)
    expected, by_torch = torch.zeros_like(integers), left.clone()
    errors = gptq._ByTorch.round_columns(by_torch, scale, zero, factors, expected, _LARGEST)
    made = round_columns.round_columns(left, scale, zero, factors, integers, _LARGEST)
    # A sum in another order can round to the other of two integers that are as near, and so go on in its row.
    same = (integers == expected).all(dim=1)
    assert float(same.float().mean()) > 0.97
    assert torch.allclose(made[same], errors[same], atol=1e-4)
    assert float(integers.max()) <= _LARGEST
    assert float(integers.min()) >= 0


@pytest.mark.parametrize(
    ("rows", "columns", "width"), cases([(3, 16, 16), (37, 24, 40)], [(500, 128, 384), (4096, 128, 4096)])
)
def test_columns_descend_as_by_torch(rows: int, columns: int, width: int) -> None:
    _, scale, zero, _ = block(rows, columns, width)
    inputs = normal(2 * columns, columns, seed=4)
    hessian, gradient = inputs.t() @ inputs, normal(rows, columns, seed=5) * columns
    expected, integers = zero.clone(), torch.zeros(rows, width, device=DEVICE)[:, :columns]
    integers.copy_(zero)
    gptq._ByTorch.descend_columns_(expected, scale, gradient.clone(), hessian, _LARGEST)
    round_columns.descend_columns_(integers, scale, gradient, hessian, _LARGEST)
    same = (integers == expected).all(dim=1)
    assert float(same.float().mean()) > 0.97
    assert not torch.equal(integers, zero)


@pytest.mark.parametrize(("rows", "columns"), cases([(40, 256)], [(700, 512)]))
def test_a_weight_is_rounded_by_kernels_as_well_as_by_torch(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = normal(1500, columns) * torch.linspace(0.2, 4, columns, device=DEVICE)
    weight, hessian, errors = normal(rows, columns, seed=6), inputs.t() @ inputs, list[float]()
    for how in (round_columns, gptq._ByTorch):
        monkeypatch.setattr(gptq, "_block_rounding", lambda _, how=how: how)
        integers, scale, zero = gptq.gptq_groups(weight, hessian, 128)
        wide_scale, wide_zero = (one.repeat_interleave(128, 1) for one in (scale, zero))
        made = (integers - wide_zero) * wide_scale
        errors.append(float((inputs @ (made - weight).t()).square().mean()))
    assert errors[0] == pytest.approx(errors[1], rel=0.01)
