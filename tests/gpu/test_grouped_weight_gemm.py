"""GEMMs with weights of any group size against fp64 products of the weights that they stand for."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from mini_infer_engine.kernels.gemm.grouped_weight import dequantized_groups
from mini_infer_engine.kernels.gemm.grouped_weight_gemm import grouped_weight_linear, widened_groups
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, error, normal
from tests.support.grouped_weights import FORMS, moved, random_weight

pytestmark = KERNELS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    cases(
        [(3, 40, 192, FP32), (0, 40, 128, FP32), (70, 40, 128, FP32)],
        [(1, 3584, 3584, BF16), (17, 200, 704, BF16), (64, 9000, 1152, BF16), (300, 640, 1024, BF16)],
    ),
)
def test_the_product_is_that_of_the_dequantised_weights(
    m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, form: str
) -> None:
    x, weight = normal(m, 2 * k, dtype=dtype)[:, :k], moved(random_weight(form, n, k), DEVICE)
    bias = normal(n, dtype=dtype, seed=3) if has_bias else None
    exact = functional.linear(x.double(), dequantized_groups(weight).double(), None if bias is None else bias.double())
    limit = 3 if dtype == BF16 else 64  # each weight and the result are rounded once
    assert error(grouped_weight_linear(x, weight, bias=bias), exact) < limit
    out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
    assert grouped_weight_linear(x, weight, bias=bias, out=out).data_ptr() == out.data_ptr()
    assert error(out, exact) < limit


@pytest.mark.parametrize("form", FORMS)
def test_widened_weights_are_the_dequantised_ones(form: str) -> None:
    weight = moved(random_weight(form, 37, 160), DEVICE)
    assert torch.allclose(widened_groups(weight, FP32), dequantized_groups(weight), rtol=1e-6, atol=1e-7)
