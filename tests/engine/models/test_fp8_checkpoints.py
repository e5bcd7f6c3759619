"""FP8 checkpoints on a CPU: logits are those of the weights that they stand for; what is not supported is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.registry import read_config
from tests.support.fp8_checkpoints import FORMATS, quantize_folder
from tests.support.tiny_models import (
    LONGROPE_PARTIAL,
    PageDealer,
    reference_logits,
    run_chunks,
    save_tiny_model,
    tiny_runner,
)

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "phi3", "glm4"])
def test_logits_equal_those_of_the_dequantised_weights(architecture: str, form: str, tmp_path: Path) -> None:
    changes = LONGROPE_PARTIAL | {"hidden_size": 64} if architecture == "phi3" else {"hidden_size": 80}
    model = save_tiny_model(tmp_path, architecture, intermediate_size=104, **changes)
    model.load_state_dict(quantize_folder(tmp_path, form), strict=False)
    expected = reference_logits(model, TOKENS)
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("name", ["down_proj", "mlp.down_proj", "model.layers.1"])
def test_unconverted_layers_match_by_prefix_or_suffix(name: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    change_config(tmp_path, {"quant_method": "fp8", "modules_to_not_convert": [name]})
    schemes = read_config(tmp_path).quantization
    assert schemes is not None
    assert schemes.scheme_of("model.layers.1.mlp.down_proj") is None
    assert schemes.scheme_of("model.layers.10.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "fp8"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size", "[128]"]),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, ["config_groups"]),
    ],
)
def test_an_unsupported_quantisation_scheme_is_refused_before_weights_are_read(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama")
    change_config(tmp_path, changes)
    with pytest.raises(ModelError, match="quantization_config") as raised:
        read_config(tmp_path)
    for word in words:
        assert word in str(raised.value)


def test_the_error_names_a_tensor_when_its_scale_or_dtype_is_wrong(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    quantize_folder(tmp_path, "compressed-channel")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    for wrong, words in (
        ({f"{name}_scale": tensors[f"{name}_scale"][:5]}, "has shape"),
        ({name: tensors[name].float()}, "is torch.float32"),
    ):
        save_file(tensors | wrong, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match="down_proj") as raised:
            tiny_runner(tmp_path)
        assert words in str(raised.value)


def change_config(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
