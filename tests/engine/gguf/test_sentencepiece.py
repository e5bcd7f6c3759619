"""Folders that have tokenizer.model alone: the ids of the same vocabulary in a GGUF file, and of sentencepiece."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.model_path import resolve_model
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from tests.engine.gguf.test_gguf_tokenizer import encoder_of, sentencepiece_header

TEXTS = ["and band aa", "  and\n\nnab é", "", " ", "<turn>and"]


def varint(value: int) -> bytes:
    value %= 1 << 64
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def model_file(trainer: dict[int, Any] | None = None, normalizer: dict[int, Any] | None = None) -> bytes:
    """The vocabulary of `sentencepiece_header` as SentencePiece writes it."""
    metadata = sentencepiece_header().metadata
    rows = zip(*(metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")), strict=True)
    pieces = [field(1, token.encode()) + field(2, float(score)) + field(3, kind) for token, score, kind in rows]
    parts = {2: {3: 2, 40: 0, 41: 1, 42: 2, 43: -1} | (trainer or {}), 3: {1: b"identity", 4: 0} | (normalizer or {})}
    ends = [field(at, b"".join(field(*entry) for entry in part.items())) for at, part in parts.items()]
    return b"".join([*(field(1, piece) for piece in pieces), *ends])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_of(tmp_path: Path, content: bytes, **tokenizer_config: Any) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_are_those_of_the_vocabulary_when_a_folder_has_no_tokenizer_json(prefix: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_file(normalizer={3: int(prefix)}))
    made = resolve_model(str(folder))
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert resolve_model(str(folder)) == made
    encoder, expected = (
        PromptEncoder(PromptAssets.from_directory(made)),
        encoder_of(sentencepiece_header(add_space_prefix=prefix)),
    )
    for text in TEXTS:
        assert encoder.encode(text, True) == expected.encode(text, True)
    assert encoder.special_tokens == expected.special_tokens


def test_the_folders_own_config_counts_when_it_has_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_file(), chat_template="{{ messages }}", eos_token="<turn>")
    encoder = PromptEncoder(PromptAssets.from_directory(resolve_model(str(folder))))
    assert encoder.special_tokens == {"eos_token": "<turn>"}
    assert encoder.template_sources == {"default": "{{ messages }}"}


def test_a_folder_stays_as_it_is_when_it_has_a_tokenizer_json(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, b"")
    (folder / "tokenizer.json").write_text("{}")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 30,
        b"IQ== 0\nIg== 1\n",
        model_file()[:-3],
        model_file(trainer={3: 1}),
        model_file(normalizer={2: b"rules"}),
        model_file(normalizer={4: 1}),
        field(1, field(1, b"\xff\xfe")) + model_file(),
        field(1, 5) + model_file(),
        field(1, field(2, 7)) + model_file(),
    ],
)
def test_a_remedy_is_named_when_tokenizer_model_is_of_another_kind(content: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, content)
    with pytest.raises(ModelError, match=r"tokenizer\.model .*save_pretrained"):
        resolve_model(str(folder))
