"""Adds a `tokenizer.json` to a model folder that has only `tokenizer.model` (SentencePiece), in a cached copy.

`tokenizer.model` is a protobuf message (sentencepiece_model.proto), of which this module parses a few fields itself.
GGUF files have the same vocabulary, pieces with scores and types, so that both become a tokenizer in the same way. No
torch.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.folder import cache_roots, write_folder
from mini_infer_engine.gguf.header import GgufHeader
from mini_infer_engine.gguf.tokenizer import tokenizer_files

MODEL_FILE = "tokenizer.model"
_FORM = 1
"""The version of the folder's content; a new number makes new folders."""
_BPE = 2
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _UNKNOWN, _BOS, _EOS = 3, 40, 41, 42
_CHARACTER_MAP, _DUMMY_PREFIX, _REMOVES_SPACES = 2, 3, 4
_REMEDY = "make a tokenizer.json with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"


def with_tokenizer_json(directory: Path) -> Path:
    """Returns a folder with the same files and a tokenizer.json, or the same folder if it needs none.

    Raises ModelError if `tokenizer.model` cannot be read, or is not of the kind that Llama's and Mistral's first models
    have.
    """
    source = directory / MODEL_FILE
    if (directory / "tokenizer.json").exists() or not source.is_file():
        return directory
    status = source.stat()
    identity = repr(
        (_FORM, str(directory.resolve()), status.st_size, status.st_mtime_ns, sorted(os.listdir(directory)))
    )
    name = f"{directory.resolve().name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    for root in cache_roots("tokenizers"):
        if (root / name / "tokenizer.json").is_file():
            return root / name
    files = tokenizer_files(_header(source))
    if (directory / "tokenizer_config.json").exists():
        del files["tokenizer_config.json"]
    links = {file.name: file.resolve() for file in directory.iterdir()}
    for root in cache_roots("tokenizers"):
        try:
            return write_folder(root, name, files, links, "tokenizer.json")
        except OSError:
            continue  # a read-only home: the next root
    raise ModelError(f"{directory}: there is no folder to write a tokenizer.json to: set XDG_CACHE_HOME to one.")


def _header(path: Path) -> GgufHeader:
    """Returns the vocabulary in the form of a GGUF file's header."""
    content = path.read_bytes()
    try:
        message = _Message(content)
        trainer, normalizer = _Message(message.last(_TRAINER, b"")), _Message(message.last(_NORMALIZER, b""))
        pieces = [_Message(piece) for piece in message.all(_PIECES)]
        metadata: dict[str, Any] = {
            "tokens": [piece.last(1, b"").decode() for piece in pieces],
            "scores": [struct.unpack("<f", piece.last(2, bytes(4)))[0] for piece in pieces],
            "token_type": [piece.last(3, 1) for piece in pieces],
            "unknown_token_id": trainer.last(_UNKNOWN, 0),
            "bos_token_id": _signed(trainer.last(_BOS, 1)),
            "eos_token_id": _signed(trainer.last(_EOS, 2)),
            "add_space_prefix": bool(normalizer.last(_DUMMY_PREFIX, 1)),
        }
        kind, rewrites = trainer.last(_MODEL_TYPE, 1), normalizer.last(_CHARACTER_MAP, b"")
        removes = normalizer.last(_REMOVES_SPACES, 1)
    except (ValueError, IndexError, struct.error, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is no SentencePiece model ({error}): {_REMEDY}.") from None
    if not pieces or kind != _BPE or rewrites or removes:
        raise ModelError(
            f"{path} is of another kind than Llama's SentencePiece (BPE that leaves characters and spaces as they "
            f"are): {_REMEDY}."
        )
    return GgufHeader(
        path, {f"tokenizer.ggml.{key}": value for key, value in {"model": "llama", **metadata}.items()}, {}
    )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class _Message:
    """The fields of a protobuf message. Raises ValueError, IndexError or struct.error if the bytes are none."""

    def __init__(self, content: bytes) -> None:
        self._fields: dict[int, list[Any]] = {}
        for number, value in _fields(content):
            self._fields.setdefault(number, []).append(value)

    def all(self, number: int) -> list[Any]:
        return self._fields.get(number, [])

    def last(self, number: int, default: Any) -> Any:
        return self._fields.get(number, [default])[-1]


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield tag >> 3, value
            continue
        size, at = _varint(content, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if size < 0 or at + size > len(content):
            raise ValueError(f"a field of type {kind} at byte {at} does not fit")
        yield tag >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number at byte {at} does not end")
