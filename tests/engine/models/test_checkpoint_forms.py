"""The same weights under the names and in the files that checkpoints of other origin have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.registry import read_config
from tests.engine.models.test_bad_model_folders import edit_json
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = list(range(5, 40))
TOLERANCE = 1e-4


def logits(directory: Path) -> torch.Tensor:
    runner = tiny_runner(directory)
    return run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), [20, 15])


def rename(directory: Path, change: Callable[[str], str | None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({new: tensors[name] for name in tensors if (new := change(name)) is not None}, file)


def without_prefix(name: str) -> str:
    return name.removeprefix("model.")


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "mistral", "llama", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_when_names_lack_the_model_prefix(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, architecture, tie_word_embeddings=tied)
    rename(tmp_path, without_prefix)
    assert (logits(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("named", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_hidden_states_equal_transformers_when_an_embedding_model_has_no_head(
    named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    rename(tmp_path, lambda name: None if name.startswith("lm_head") else without_prefix(name))
    edit_json(tmp_path, "config.json", architectures=[named])
    assert (logits(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= TOLERANCE
    assert "no lm_head" in caplog.text


def test_a_missing_head_is_an_error_when_the_checkpoint_is_a_causal_models(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=False)
    rename(tmp_path, lambda name: None if name.startswith("lm_head") else name)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        tiny_runner(tmp_path)


def test_the_files_head_is_used_when_it_differs_from_tied_embeddings(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen2", tie_word_embeddings=False)
    edit_json(tmp_path, "config.json", tie_word_embeddings=True)
    assert (logits(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("absent", ["", "model.embed_tokens.weight", "lm_head.weight"])
def test_one_table_is_enough_when_head_and_embeddings_are_tied(absent: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors.pop(absent, None)
    save_file(tensors, tmp_path / "model.safetensors")
    runner = tiny_runner(tmp_path)
    assert runner.worker.model.lm_head is None
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), [35])
    assert (actual - reference_logits(model, TOKENS)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("beside", ["adapter_model.safetensors", "consolidated.safetensors", "extra.safetensors"])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_other_files_are_left_alone_when_they_lie_beside_a_whole_checkpoint(
    beside: str, shard_size: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, "qwen3", shard_size=shard_size)
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, tmp_path / beside)
    assert (logits(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("weight_map", [{"model.norm.weight": "old.safetensors"}, {}])
def test_the_whole_file_is_read_when_a_stale_index_lies_beside_it(weight_map: dict[str, str], tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen3")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert (logits(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= TOLERANCE


def test_an_index_is_refused_when_it_names_files_of_other_folders(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "a", "qwen3")
    save_tiny_model(tmp_path / "b", "qwen3")
    (tmp_path / "a" / "model.safetensors").unlink()
    weight_map = {"model.norm.weight": "../b/model.safetensors"}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index\.json names '\.\./b/model\.safetensors'"):
        tiny_runner(tmp_path / "a")


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def save_image_model(directory: Path, architecture: str) -> Any:
    torch.manual_seed(7)
    if architecture == "gemma3":
        vision = transformers.SiglipVisionConfig(**VISION)
        config: Any = transformers.Gemma3Config(
            text_config=TEXT | {"sliding_window": 8, "sliding_window_pattern": 2}, vision_config=vision.to_dict()
        )
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
    else:
        vision = transformers.PixtralVisionConfig(**VISION)
        text = TEXT | {"model_type": "mistral", "sliding_window": None}
        config = transformers.Mistral3Config(text_config=text, vision_config=vision.to_dict())
        model = transformers.Mistral3ForConditionalGeneration(config)
    model.eval().save_pretrained(directory)
    return model


@pytest.mark.parametrize("architecture", ["gemma3", "mistral3"])
@pytest.mark.parametrize("renamed", [False, True])
def test_text_logits_equal_transformers_when_a_model_reads_images_too(
    architecture: str, renamed: bool, tmp_path: Path
) -> None:
    model = save_image_model(tmp_path, architecture)
    if renamed:  # as transformers 5 has them in memory
        prefixes = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
        rename(
            tmp_path,
            lambda name: next((new + name[len(old) :] for old, new in prefixes.items() if name.startswith(old)), name),
        )
    expected = model(input_ids=torch.tensor([TOKENS])).logits[0].detach()
    assert (logits(tmp_path) - expected).abs().max() <= TOLERANCE


def test_gemma_3_is_windowed_as_in_transformers_when_the_file_says_only_what_differs(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text | scaling, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 106]}))
    read = read_config(tmp_path)
    assert (read.vocab_size, read.num_heads, read.num_kv_heads, read.head_dim) == (262_208, 8, 4, 256)
    assert (read.dtype, read.eos_token_ids, read.tie_word_embeddings) == ("bfloat16", (1, 106), True)
    assert read.max_position_embeddings == 131_072
    assert read.sliding_windows[:6] == (1024,) * 5 + (None,)
    assert [rope.theta for rope in read.ropes[4:6]] == [1e4, 1e6]


def test_gemma_3_has_transformers_window_when_the_file_names_none(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "gemma3_text", num_hidden_layers=6)
    edit_json(tmp_path, "config.json", sliding_window=..., layer_types=...)
    assert (logits(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= 5 * TOLERANCE


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, ["Qwen2VL", "images"]),
        ({"architectures": ["MllamaForConditionalGeneration"], "vision_config": {}}, ["Mllama", "images"]),
        ({"architectures": ["NewVLModel"], "vision_config": {}}, ["NewVLModel", "images"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["text_config", "object"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": []}, ["text_config", "object"]),
    ],
)
def test_images_are_named_when_a_model_that_reads_them_is_refused(
    config: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        tiny_runner(tmp_path)
    assert all(word in str(caught.value) for word in words)
