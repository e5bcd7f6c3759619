"""SmoothQuant's arithmetic: products stay, operands round better, norms in 16 bits lose nothing."""

import pytest
import torch
from torch import Tensor

from mini_infer_engine.quantization.on_load import rounded_rows
from mini_infer_engine.quantization.smooth import smoothed, smoothing_divisors


def made(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised rows of which three columns are large once the norm has weighted them, its weights, a product's."""
    dice = torch.Generator().manual_seed(3)
    norm = torch.rand(64, generator=dice) + 0.5
    norm[[5, 20, 41]] *= 60
    return torch.randn(40, 64, generator=dice), norm.to(dtype), torch.randn(48, 64, generator=dice) / 8


def test_smoothing_divisors_balance_activations_and_weights() -> None:
    activations, weights = torch.tensor([16.0, 1.0, 0.0, 4.0]), torch.tensor([1.0, 4.0, 1.0, 0.0])
    assert smoothing_divisors(activations, weights).tolist() == [4.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smoothing_keeps_the_product(dtype: torch.dtype) -> None:
    rows, norm, weight = made(dtype)
    norm[7] = 0
    maxima = (rows * norm.float()).abs().amax(0)
    divided, scaled = smoothed(norm, weight, maxima, weight.abs().amax(dim=0))
    assert divided.dtype == dtype
    exact = rows.double() * norm.double() @ weight.double().t()
    assert (rows.double() * divided.double() @ scaled.double().t() - exact).abs().max() < 1e-4


def test_smoothed_operands_have_less_quantisation_error() -> None:
    rows, norm, weight = made()
    exact = (rows * norm) @ weight.t()

    def error(norm: Tensor, weight: Tensor) -> float:
        (x, x_scale), (w, w_scale) = rounded_rows(rows * norm), rounded_rows(weight)
        return float(((x * x_scale) @ (w * w_scale).t() - exact).square().mean().sqrt())

    maxima = (rows * norm).abs().amax(0)
    assert error(*smoothed(norm, weight, maxima, weight.abs().amax(dim=0))) < 0.5 * error(norm, weight)
