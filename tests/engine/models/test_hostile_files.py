"""Files that lie about sizes end the start with one error, before memory is taken."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_prompts import prompt
from mini_infer_prompts.prompt import PromptAssets
from tests.engine.models.test_bad_model_folders import edit_json
from tests.support.tiny_models import DEEPSEEK_V3, save_tiny_model, tiny_runner

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": DEEPSEEK_V3,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MIXTURES}
    for name, changes in MIXTURES.items():
        save_tiny_model(made[name], name, **changes)
    return made


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(
            ("qwen3", name)
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
        ),
        ("qwen3", "max_position_embeddings"),
        ("qwen3", "num_hidden_layers"),
        ("qwen3_moe", "num_experts"),
        ("qwen3_moe", "num_local_experts"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("deepseek_v3", "n_routed_experts"),
        ("deepseek_v3", "kv_lora_rank"),
    ],
)
@pytest.mark.parametrize("value", [2**31 - 1, 2**40 + 1, 10**30, -1])
def test_absurd_sizes_are_refused_before_memory_is_taken_when_a_config_names_them(
    architecture: str,
    name: str,
    value: int,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "max_position_embeddings" and value == 2**31 - 1:
        value = 2**40 + 1  # as many positions could be: the pool limits them
    folder = tmp_path / "model"
    shutil.copytree(folders[architecture], folder)
    edit_json(folder, "config.json", **{name: value})
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    with pytest.raises(ModelError):
        tiny_runner(folder)


def lie(file: Path, change: dict[str, Any]) -> None:
    """Changes the first tensor's entry in the header, which keeps its length."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    header[first] |= change
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**12, 10**12]},
        {"shape": [-1]},
        {"data_offsets": [0, 10**15]},
        {"data_offsets": [10**15, 0]},
        {"dtype": "F7"},
        {"shape": "wide"},
        {"dtype": None},
    ],
)
def test_a_header_that_lies_is_named_when_weights_are_read(
    change: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3"], folder)
    lie(folder / "model.safetensors", change)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        tiny_runner(folder)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, struct.pack("<Q", 2**63), struct.pack("<Q", 2**20) + b"{", b"PK"])
def test_a_file_that_is_cut_short_is_named_when_weights_are_read(
    content: bytes, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3"], folder)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        tiny_runner(folder)
    assert load_file(folders["qwen3"] / "model.safetensors")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"])
def test_a_file_is_not_read_when_it_is_larger_than_any_of_its_kind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("tokenizer.json", name):
        (tmp_path / file).write_text("{}")
    (tmp_path / name).write_text(" " * 1001)
    monkeypatch.setattr(prompt, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ValueError, match=rf"{name} .*1,001 bytes.*1,000"):
        PromptAssets.from_directory(tmp_path)
