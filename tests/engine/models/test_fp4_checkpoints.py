"""NVFP4 and MXFP4 checkpoints on a CPU: logits are those of the weights that they stand for; others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.registry import read_config
from tests.support.bad_checkpoints import scheme_is_refused, tensor_is_named
from tests.support.fp4_checkpoints import FORMATS, quantize_folder
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.parametrize("form", FORMATS)
def test_logits_equal_those_of_the_dequantised_weights(form: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen2", hidden_size=64, intermediate_size=96)
    unquantised = reference_logits(model, TOKENS)
    model.load_state_dict(quantize_folder(tmp_path, form), strict=False)
    expected = reference_logits(model, TOKENS)
    assert (expected - unquantised).abs().max() > 1e-2
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - expected).abs().max() <= 1e-3


def test_dummy_weights_of_a_quantised_checkpoint_run(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **SHAPE)
    quantize_folder(tmp_path, "nvfp4")
    runner = tiny_runner(tmp_path, load_format="dummy")
    assert torch.isfinite(run_chunks(runner, TOKENS, PageDealer(runner).table(40), [40])).all()


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4} | weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ["MIXED_PRECISION", "quantized_layers"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ["group_size = 32", "16"]),
        (compressed("nvfp4-pack-quantized", group_size=32), ["group_size = 32", "nvfp4-pack-quantized"]),
        (compressed("float-quantized", group_size=16), ["format = 'float-quantized'", "mxfp4-pack-quantized"]),
    ],
)
def test_an_unsupported_quantisation_scheme_is_refused_before_weights_are_read(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama", **SHAPE)
    scheme_is_refused(tmp_path, changes, words)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("weight_packed", torch.zeros(64, 47, dtype=torch.uint8), "has shape [64, 47]"),
        ("weight_scale", torch.zeros(64, 6), "is torch.float32, and config.json asks for torch.float8_e4m3fn"),
        ("weight_global_scale", torch.zeros(64), "has shape [64]"),
        ("weight_global_scale", None, "is in no safetensors file"),
    ],
)
def test_the_error_names_a_tensor_before_allocation_when_it_does_not_fit(
    name: str, wrong: torch.Tensor | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "llama", **SHAPE)
    quantize_folder(tmp_path, "nvfp4")
    tensor_is_named(tmp_path, name, wrong, words, monkeypatch)


def test_the_error_names_a_layer_when_its_width_is_no_multiple_of_the_group(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **SHAPE)
    quantize_folder(tmp_path, "mxfp4")
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp.*groups of 32"):
        tiny_runner(tmp_path)


def test_kv_cache_dtype_is_read_from_modelopts_config(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **SHAPE)
    file = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    config = read_config(tmp_path)
    assert (config.quantization, config.kv_cache_dtype) == (None, "fp8")
