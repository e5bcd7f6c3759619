"""FP8 checkpoints: whole models against the weights that they stand for."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from tests.gpu.device import INTERPRETED, KERNELS
from tests.gpu.runs import make_runner, make_settings
from tests.support.fp8_checkpoints import FORMATS, quantize_folder
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model

pytestmark = KERNELS
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(90)]


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
