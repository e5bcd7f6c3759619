"""GPTQ, AWQ and compressed-tensors' integers: logits are those of the weights that the checkpoints stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.quantization.integer import IntegerScheme
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.registry import read_config
from tests.support.bad_checkpoints import scheme_is_refused, tensor_is_named
from tests.support.integer_checkpoints import FORMATS, quantize_folder
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SHAPE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_logits_equal_those_of_the_dequantised_weights(architecture: str, form: str, tmp_path: Path) -> None:
    """With layers of several parts, with biases, and with parts that are one tensor."""
    changes = {"original_max_position_embeddings": 512} if architecture == "phi3" else {}
    model = save_tiny_model(tmp_path, architecture, **SHAPE, **changes)
    unquantised = reference_logits(model, TOKENS)
    model.load_state_dict(quantize_folder(tmp_path, form), strict=False)
    expected = reference_logits(model, TOKENS)
    assert (expected - unquantised).abs().max() > 1e-2
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("form", ["gptq", "w4a16", "w8a8"])
def test_a_quantised_lm_head_is_loaded(form: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama", head_dim=16, vocab_size=208)
    exact = quantize_folder(tmp_path, form, head=True)
    assert not torch.equal(exact["lm_head.weight"], model.lm_head.weight)
    model.load_state_dict(exact, strict=False)
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [40])
    assert (actual - reference_logits(model, TOKENS)).abs().max() <= 1e-3


@pytest.mark.parametrize(("form", "rounds"), [("w8a8", True), ("w8a8-tensor-asymmetric", False), ("w4a16", False)])
def test_activations_are_quantised_when_the_checkpoint_is_w8a8(form: str, rounds: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, form)
    schemes = read_config(tmp_path).quantization
    assert schemes is not None
    scheme = schemes.scheme_of("model.layers.0.mlp.down_proj")
    assert isinstance(scheme, IntegerScheme)
    assert scheme.int8_activations == rounds


def test_actorder_dynamic_of_compressed_tensors_means_group(tmp_path: Path) -> None:
    """Where the package was asked for "dynamic" it wrote that, and meant "group"."""
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, "w4a16-act-order")
    expected = _logits(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"actorder": "group"', '"actorder": "dynamic"'))
    assert torch.equal(_logits(tmp_path), expected)


def test_dummy_weights_of_a_quantised_checkpoint_run(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, "gptq-act-order")
    runner = tiny_runner(tmp_path, load_format="dummy")
    assert torch.isfinite(run_chunks(runner, TOKENS, PageDealer(runner).table(40), [40])).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, ["bits = 3", "4 and 8"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ["group_size = 0"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["-:x"]}, ["dynamic", "object of patterns"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x(": {}}}, ["dynamic", "'x('", "regular expression"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 3}}}, ["bits = 3", "dynamic: x"]),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": ["q_proj"]}, ["list of lists"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["marlin", "gptq_v2"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["gemv", "gemm"]),
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "awq"]),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 3}}},
            },
            ["3 bits"],
        ),
    ],
)
def test_an_unsupported_quantisation_scheme_is_refused_before_weights_are_read(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama")
    scheme_is_refused(tmp_path, changes, words)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("qweight", torch.zeros(3, 3, dtype=torch.int32), "has shape [3, 3]"),
        ("qweight", torch.zeros(12, 64), "is torch.float32, and config.json asks for torch.int32"),
        ("scales", torch.zeros(3, 64, dtype=torch.int32), "is torch.int32"),
        ("g_idx", None, "is in no safetensors file"),
        ("g_idx", torch.arange(96, dtype=torch.int32) // 24, "a column is of group 3, and there are scales of 3"),
        ("g_idx", torch.arange(96, dtype=torch.int32) // 32 - 1, "says that a column is of group -1"),
    ],
)
def test_the_error_names_a_tensor_before_allocation_when_it_does_not_fit(
    name: str, wrong: torch.Tensor | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, "gptq-act-order")
    tensor_is_named(tmp_path, name, wrong, words, monkeypatch)


@pytest.mark.parametrize(
    ("form", "scheme_name"),
    [
        ("gptq", "gptq int4 by groups of 32"),
        ("gptq-8-rows", "gptq int8"),
        ("awq", "awq int4 by groups of 32"),
        ("w8a8", "int8"),
    ],
)
def test_quantisation_schemes_have_readable_names(form: str, scheme_name: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, form)
    schemes = read_config(tmp_path).quantization
    assert schemes is not None
    assert schemes.name == scheme_name


@pytest.mark.parametrize("form", ["gptq", "gptq-act-order"])
def test_zero_biases_written_by_gptq_tools_are_ignored(form: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, form)
    expected = _logits(tmp_path)
    _add_bias(tmp_path, torch.zeros(64))
    assert torch.equal(_logits(tmp_path), expected)


@pytest.mark.parametrize(
    ("form", "bias", "words"), [("gptq", torch.eye(64)[3], "is not zero"), ("awq", torch.zeros(64), "has no place")]
)
def test_the_error_names_a_bias_before_allocation_when_the_model_has_none(
    form: str, bias: torch.Tensor, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, form)
    _add_bias(tmp_path, bias)
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.mlp\.down_proj\.bias {words}"):
        tiny_runner(tmp_path)


def _logits(folder: Path) -> torch.Tensor:
    runner = tiny_runner(folder)
    return run_chunks(runner, TOKENS, PageDealer(runner).table(40), [40])


def _add_bias(folder: Path, bias: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.mlp.down_proj.bias": bias}, file)


def test_the_error_names_a_layer_when_its_width_is_no_multiple_of_a_word(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize_folder(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp.*words of 8"):
        tiny_runner(tmp_path)
