"""Folders without a tokenizer.json: the ids of the same vocabulary in a GGUF file, and of transformers' own classes."""

import base64
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.model_path import resolve_model
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from tests.engine.gguf.test_gguf_tokenizer import encoder_of, sentencepiece_header

CORPUS = ["the quick brown fox jumps over the lazy dog", "def f(x): return x + 1", "été, 日本語 and more", "a  b\nc"]
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
    parts = {
        2: {3: 2, 35: 1, 40: 0, 41: 1, 42: 2, 43: -1} | (trainer or {}),
        3: {1: b"identity", 4: 0} | (normalizer or {}),
    }
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


@pytest.mark.parametrize("content", [b"", b"\xff" * 30, model_file()[:-3], model_file(normalizer={2: b"rules"})])
def test_a_remedy_is_named_when_tokenizer_model_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, content)
    with pytest.raises(ModelError, match=r"tokenizer\.model .*save_pretrained"):
        resolve_model(str(folder))


def trained(folder: Path, **options: Any) -> None:
    """Trains a SentencePiece model of all texts on `tokenizer.model`."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(folder / "tokenizer"), minloglevel=3, **options
    )


def tiktoken_file(folder: Path) -> None:
    """Writes ranks of all bytes and some merges as tiktoken stores them."""
    words = [bytes([number]) for number in range(256)] + [b"th", b"the", b" t", b" the"]
    lines = (f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(words))
    (folder / "tokenizer.model").write_text("\n".join(lines))


def merges(folder: Path) -> None:
    """Writes vocab.json and merges.txt of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))


def word_pieces(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "br", "##own", "fox", ",", "e", "##t", "##e"]
    (folder / "vocab.txt").write_text("\n".join(words))


OTHERS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "unigram": ("T5Tokenizer", "t5", partial(trained, model_type="unigram", vocab_size=44)),
    "rules": ("GemmaTokenizer", "gemma", partial(trained, model_type="bpe", vocab_size=320, byte_fallback=True)),
    "tiktoken": ("PreTrainedTokenizerFast", "llama", tiktoken_file),
    "merges": ("GPT2Tokenizer", "gpt2", merges),
    "qwen2": ("Qwen2Tokenizer", "qwen2", merges),
    "word pieces": ("BertTokenizer", "bert", word_pieces),
}


@pytest.mark.parametrize("name", OTHERS)
def test_ids_are_those_of_transformers_when_a_tokenizer_has_another_form(name: str, tmp_path: Path) -> None:
    tokenizer_class, model_type, write = OTHERS[name]
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    expected = AutoTokenizer.from_pretrained(tmp_path)
    encoder = PromptEncoder(PromptAssets.from_directory(resolve_model(str(tmp_path))))
    for text in (*CORPUS, *TEXTS):
        assert encoder.encode(text, True) == expected(text).input_ids, text
