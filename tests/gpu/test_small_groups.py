"""Checkpoints whose groups are smaller than 128 columns, and experts: models against the weights they stand for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from tests.gpu.device import INTERPRETED, KERNELS
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.fp4_checkpoints import quantize_folder as quantize_to_fp4
from tests.support.fp8_checkpoints import quantize_folder as quantize_to_fp8
from tests.support.integer_checkpoints import quantize_folder as quantize_to_integers
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

pytestmark = [
    *KERNELS,
    pytest.mark.skipif(INTERPRETED, reason="whole models are too slow for the interpreter: needs an NVIDIA GPU"),
]
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(90)]
MAKERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    **{form: partial(quantize_to_fp4, form=form) for form in ("nvfp4", "mxfp4", "modelopt")},
    **{form: partial(quantize_to_integers, name=form) for form in ("gptq", "gptq-act-order", "awq", "w4a16")},
    "fp8-block": partial(quantize_to_fp8, form="fp8-block"),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_logits_are_those_of_the_dequantised_weights(maker: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen2", head_dim=32, hidden_size=256, intermediate_size=384)
    model.load_state_dict(MAKERS[maker](tmp_path), strict=False)
    expected = reference_logits(model, TOKENS)
    runner = make_runner(make_settings(tmp_path, enforce_eager=True, page_size=16))
    assert type(runner.worker.model.layers[0].mlp.down_proj.method).__name__ == "GroupedMethod"
    dealer = PageDealer(runner)
    for sizes in ([90], [33, 1, 56], [80] + [1] * 10):
        actual = run_chunks(runner, TOKENS, dealer.table(90), sizes).cpu()
        assert (actual - expected).abs().max() <= 1e-3, sizes


@pytest.mark.parametrize("maker", ["nvfp4", "gptq-act-order"])
def test_graphs_and_single_passes_make_the_same_text(maker: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64, hidden_size=256, intermediate_size=384)
    MAKERS[maker](tmp_path)
    made = []
    for eager in (False, True):
        settings = make_settings(tmp_path, dtype="bfloat16", enforce_eager=eager)
        made.append(texts(make_engine(settings, make_runner(settings)), mixed_requests(12, 199, 100)))
    same = sum(first == second for first, second in zip(*made, strict=True))
    assert same >= len(made[0]) * 3 // 4, "rows of other passes round differently, most texts are the same"


@pytest.mark.parametrize("maker", ["nvfp4", "fp8-block", "awq"])
def test_quantised_experts(maker: str, tmp_path: Path) -> None:
    """On a GPU against a CPU, which dequantises each expert when it computes."""
    shape = {"hidden_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    save_tiny_model(tmp_path, "qwen3_moe", head_dim=32, **shape)
    MAKERS[maker](tmp_path)
    runner = make_runner(make_settings(tmp_path, enforce_eager=True, page_size=16))
    on_cpu = tiny_runner(tmp_path)
    expected = run_chunks(on_cpu, TOKENS, PageDealer(on_cpu).table(90), [90])
    for sizes in ([90], [33, 1, 1, 55]):
        actual = run_chunks(runner, TOKENS, PageDealer(runner).table(90), sizes).cpu()
        assert (actual - expected).abs().max() <= 1e-3, sizes
