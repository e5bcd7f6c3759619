"""FP8 weights: the kernel against fp64, and whole models against the weights that they stand for."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from mini_infer_engine.kernels.gemm.fp8_gemm import fp8_gemm
from tests.gpu.device import BF16, FP32, INTERPRETED, KERNELS, cases, error, normal
from tests.gpu.runs import make_runner, make_settings
from tests.support.fp8_checkpoints import FORMATS, quantize_folder
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model

pytestmark = KERNELS
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(90)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("blocks", ["one", "many"])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    cases(
        [(3, 40, 96, FP32)], [(1, 3584, 3584, BF16), (40, 200, 704, BF16), (300, 640, 1024, BF16), (70, 96, 160, FP32)]
    ),
)
def test_the_product_is_that_of_the_scaled_weights(
    m: int, n: int, k: int, dtype: torch.dtype, blocks: str, has_bias: bool
) -> None:
    x = normal(m, k, dtype=dtype)
    weight = normal(n, k, seed=1).to(torch.float8_e4m3fn)
    block = k if blocks == "one" else 32
    scale = normal(n, -(-k // block), seed=2).abs() + 0.1
    bias = normal(n, dtype=dtype, seed=3) if has_bias else None
    exact = x.double() @ (weight.double() * scale.double().repeat_interleave(block, dim=1)[:, :k]).T
    exact = exact if bias is None else exact + bias.double()
    assert error(fp8_gemm(x, weight, scale, scale_block=block, bias=bias), exact) < 16


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3_text"])
@pytest.mark.skipif(INTERPRETED, reason="whole models are too slow for the interpreter: needs an NVIDIA GPU")
def test_logits_are_those_of_the_dequantised_weights(architecture: str, form: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, architecture, head_dim=32)
    model.load_state_dict(quantize_folder(tmp_path, form), strict=False)
    expected = reference_logits(model, TOKENS)
    runner = make_runner(make_settings(tmp_path, enforce_eager=True, page_size=16))
    dealer = PageDealer(runner)
    for sizes in ([90], [33, 1, 56], [80] + [1] * 10):
        actual = run_chunks(runner, TOKENS, dealer.table(90), sizes).cpu()
        assert (actual - expected).abs().max() <= 1e-3, sizes
