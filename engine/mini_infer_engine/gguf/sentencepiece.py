"""Makes `tokenizer.json` of a `tokenizer.model` (SentencePiece) of the kind that Llama's and Mistral's models have.

`tokenizer.model` is a protobuf message (sentencepiece_model.proto), of which this module parses a few fields itself.
GGUF files have the same vocabulary, pieces with scores and types, so that both become a tokenizer in the same way. No
torch, and no transformers: without a tokenizer's class its AutoTokenizer reads such a file without BOS and dummy space.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_infer_engine.gguf.header import GgufHeader
from mini_infer_engine.gguf.tokenizer import tokenizer_files

_BPE = 2
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _UNKNOWN, _BOS, _EOS = 3, 40, 41, 42
_CHARACTER_MAP, _DUMMY_PREFIX, _REMOVES_SPACES = 2, 3, 4


def llama_tokenizer_files(path: Path) -> dict[str, Any] | None:
    """Returns the files of a tokenizer by name; None if `path` is of another kind than Llama's (BPE that leaves
    characters and spaces as they are), or no SentencePiece model.
    """
    header = _header(path)
    return None if header is None else tokenizer_files(header)


def _header(path: Path) -> GgufHeader | None:
    """Returns the vocabulary in the form of a GGUF file's header; None if it is of another kind."""
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
    except (ValueError, IndexError, struct.error, AttributeError, TypeError):
        return None
    if not pieces or kind != _BPE or rewrites or removes:
        return None
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
