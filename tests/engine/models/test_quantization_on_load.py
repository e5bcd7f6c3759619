"""`quantization="int8"|"int4"`: logits are those of the rounded weights; what it cannot be combined with is refused."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_engine import LLM
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.quantization.on_load import packed_nibbles, rounded_groups, rounded_rows, unpacked_nibbles
from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from tests.support.demo_reference import reference_model
from tests.support.integer_checkpoints import quantize_folder
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
KINDS = ("int8", "fp8", "int4")


def rounded_by_loops(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """int8: each row by its largest value; fp8: the same, to e4m3; int4: each 128 columns of a row, zero among
    their values."""
    exact = torch.zeros_like(weight)
    for row in range(weight.shape[0]):
        if kind == "fp8":
            scale = weight[row].abs().max().clamp(min=1e-9) / 448
            exact[row] = (weight[row] / scale).to(torch.float8_e4m3fn).float() * scale
            continue
        if kind == "int8":
            scale = weight[row].abs().max().clamp(min=1e-9) / 127
            exact[row] = (weight[row] / scale).round() * scale
            continue
        for begin in range(0, weight.shape[1], 128):
            part = weight[row, begin : begin + 128]
            scale = ((part.max().clamp(min=0) - part.min().clamp(max=0)) / 15).half().float().clamp(min=2.0**-24)
            zero = (-part.min().clamp(max=0) / scale).round()
            exact[row, begin : begin + 128] = (((part / scale).round() + zero).clamp(0, 15) - zero) * scale
    return exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_logits_equal_those_of_the_quantised_weights(architecture: str, kind: Any, tmp_path: Path) -> None:
    """200 columns: groups of 128, and of the 72 that are left."""
    changes = {"original_max_position_embeddings": 512} if architecture == "phi3" else {}
    model = save_tiny_model(tmp_path, architecture, intermediate_size=200, **changes)
    unquantised = reference_logits(model, TOKENS)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = rounded_by_loops(parameter.data, kind)
    expected = reference_logits(model, TOKENS)
    assert (expected - unquantised).abs().max() > 1e-2
    runner = tiny_runner(tmp_path, quantization=kind)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_quantized_when_it_is_requested(tied: bool, kind: Any, tmp_path: Path) -> None:
    """And embeddings are not, from which a tied one is made."""
    model = save_tiny_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    runner = tiny_runner(tmp_path, quantization=kind, quantize_lm_head=True)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = rounded_by_loops(parameter.data, kind)
    model.lm_head.weight = torch.nn.Parameter(rounded_by_loops(model.lm_head.weight.data, kind))
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - reference_logits(model, TOKENS)).abs().max() <= 1e-3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rounds_head", [False, True])
def test_embeddings_are_quantized_when_it_is_requested(rounds_head: bool, tied: bool, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    settings: dict[str, Any] = {"quantization": "int8", "quantize_lm_head": rounds_head, "quantize_embeddings": True}
    if tied and not rounds_head:
        with pytest.raises(ModelError, match="give quantize_lm_head, too"):
            tiny_runner(tmp_path, **settings)
        return
    runner = tiny_runner(tmp_path, **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = rounded_by_loops(parameter.data, "int8")
    if rounds_head:
        model.lm_head.weight = torch.nn.Parameter(rounded_by_loops(model.lm_head.weight.data, "int8"))
    table = model.model.embed_tokens
    table.weight = torch.nn.Parameter(rounded_by_loops(table.weight.data, "int8"))
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - reference_logits(model, TOKENS)).abs().max() <= 1e-3
    kept = runner.worker.model.embeddings
    assert kept.weight.dtype == torch.int8
    assert kept.scales is not None


@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_w8a8_quantises_activations_per_token(architecture: str, tmp_path: Path) -> None:
    """Without a tokenizer nothing is smoothed; the head is rounded alone, for what it reads stays as it is."""
    changes = {"original_max_position_embeddings": 512} if architecture == "phi3" else {}
    model = save_tiny_model(tmp_path, architecture, intermediate_size=200, tie_word_embeddings=False, **changes)
    runner = tiny_runner(tmp_path, quantization="w8a8-int8", quantize_lm_head=True)

    def rounded_input(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        scale = inputs[0].abs().amax(-1, keepdim=True) / 127
        return (inputs[0] / scale).round() * scale

    for name, module in model.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            module.weight.data = rounded_by_loops(module.weight.data, "int8")
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded_input)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    # A value halfway between two integers may be rounded to the other.
    assert ((actual - reference_logits(model, TOKENS)).abs() > 1e-3).float().mean() < 0.05


@pytest.fixture(scope="module")
def demo_in_four_bits() -> ModelRunner:
    """With its head, and calibrated on a quarter of the texts, which rounds it as well in a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mini_infer_engine.runtime.calibration._MOST_ROWS", 16)
        return tiny_runner(DEMO_DIRECTORY, quantization="int4", quantize_lm_head=True, dtype="float32")


def test_the_lm_head_is_rounded_to_nearest_when_calibrated(demo_in_four_bits: ModelRunner) -> None:
    runner = demo_in_four_bits
    assert torch.isfinite(run_chunks(runner, TOKENS, PageDealer(runner).table(40), [40])).all()
    head = runner.worker.model.head
    integers, scale, _ = rounded_groups(runner.worker.model.model.embed_tokens.weight, 128)
    assert torch.equal(unpacked_nibbles(head.integers, head.in_features), integers)
    assert torch.equal(head.weight_scale, scale)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 300), group=st.integers(1, 300), seed=st.integers(0, 999))
def test_weights_survive_rounding_and_packing(rows: int, columns: int, group: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    integers, scale, zero = rounded_groups(weight, group)
    wide, middle = (each.repeat_interleave(group, 1)[:, :columns] for each in (scale, zero))
    # At the ends of a range up to half a step more: the zero point is rounded, too, and scales to fp16.
    assert ((integers - middle) * wide - weight).abs().le(wide * 1.02 + 1e-6).all()
    assert int(integers.max()) <= 15
    assert torch.equal(unpacked_nibbles(packed_nibbles(integers), columns), integers)
    integers, scale = rounded_rows(weight)
    assert (integers * scale - weight).abs().le(scale / 2 + 1e-6).all()


def test_the_demo_model_keeps_its_answers_when_quantised_on_load(demo_in_four_bits: ModelRunner) -> None:
    """The most likely next token, over Python's own text; and bytes of the layers' weights."""
    encoder = PromptEncoder(PromptAssets.from_directory(DEMO_DIRECTORY))
    tokens = encoder.encode(Path(textwrap.__file__).read_text()[:3000], False)[:500]
    agreed, used = {}, {}
    best = reference_logits(reference_model(), tokens).argmax(-1)
    for kind in (None, "int8", "int4"):
        runner = demo_in_four_bits
        if kind != "int4":
            runner = tiny_runner(DEMO_DIRECTORY, quantization=kind, dtype="float32")
        actual = run_chunks(runner, tokens, PageDealer(runner).table(len(tokens)), [len(tokens)])
        agreed[kind] = float((actual.argmax(-1) == best).float().mean())
        down = runner.worker.model.layers[0].mlp.down_proj
        weights = [down.blocked] if down.blocked is not None else list(down.parameters())
        used[kind] = sum(tensor.numel() * tensor.itemsize for tensor in weights if tensor is not None)
    assert agreed[None] == 1.0
    assert agreed["int8"] >= 0.98
    assert agreed["int4"] >= 0.7  # a small model, and text that it has hardly seen; chance is far below
    assert used["int8"] <= 0.26 * used[None]
    assert used["int4"] <= 0.15 * used[None]


def test_quantisation_on_load_is_refused_when_the_checkpoint_is_quantised(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "quantised", "qwen2")
    quantize_folder(tmp_path / "quantised", "gptq")
    with pytest.raises(ModelError, match="quantised already"):
        tiny_runner(tmp_path / "quantised", quantization="int4")
    with pytest.raises(ModelError, match="goes with quantization"):
        tiny_runner(tmp_path / "quantised", quantize_lm_head=True)
    with pytest.raises(ModelError, match="quantize_embeddings goes with quantization"):
        tiny_runner(tmp_path / "quantised", quantize_embeddings=True)
    with pytest.raises(ValueError, match="int3"):
        LLM("demo", quantization="int3")
