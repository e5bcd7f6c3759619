"""Reads the header of a GGUF file: metadata, and tensors' places (llama.cpp's docs/gguf.md, versions 2 and 3).

This is not `gguf.GGUFReader`, which takes seconds with a large vocabulary, and does not detect truncated files. It
knows neither architectures nor the content of tensors. No torch: the HTTP process reads tokenizers from it.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_infer_engine.config.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Maps GGUF's value types to struct's."""

ENCODINGS = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M"),
    *("BF16", "TQ1_0", "TQ2_0", "MXFP4"),
)
"""The supported tensor types, by ggml's names; the package `gguf` has their ids and the sizes of their blocks."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """The shape in torch's order: the contiguous dimension comes last."""
    encoding: str
    """A name of `ENCODINGS`."""
    begin: int
    """The offset of the first byte in the file."""
    size: int
    """The size in bytes."""

    @property
    def row_bytes(self) -> tuple[int, int]:
        """The shape (rows, bytes of a row) of a matrix's content."""
        return self.shape[0], self.size // self.shape[0]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The content of a file before its first weight."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> "GgufHeader":
        """Reads a file. Raises ModelError if it is unreadable, no GGUF file, cut short, or not supported."""
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise ModelError(f"{path} is no GGUF file: name one, or a model folder in Hugging Face format.")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    return _Reader(path, content).header()
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error}).") from None


class _Reader:
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at = path, content, len(MAGIC)
        self.sizes = _block_sizes(path)

    def header(self) -> GgufHeader:
        version = self.scalar("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; convert the model anew.")
        num_tensors, num_fields = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(num_fields):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        found = [self.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self.broken(f"general.alignment = {alignment!r}")
        first = -(-self.at // alignment) * alignment
        tensors = {name: self.placed(name, shape, kind, first + offset) for name, shape, kind, offset in found}
        return GgufHeader(self.path, metadata, tensors)

    def placed(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        encoding, block, block_bytes = self.sizes.get(kind, (f"number {kind}", 0, 0))
        if encoding not in ENCODINGS:
            raise ModelError(f"{self.path}: tensor {name} is of type {encoding}: supported are {', '.join(ENCODINGS)}.")
        if not shape or shape[-1] % block:
            raise self.broken(f"tensor {name} of shape {list(shape)} is not made of {encoding}'s blocks of {block}")
        size = math.prod(shape) // block * block_bytes
        if begin + size > len(self.content):
            missing = begin + size - len(self.content)
            raise self.cut_short(f"tensor {name} ends {missing:,} bytes behind the end of the file")
        return GgufTensor(name, shape, encoding, begin, size)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self.broken(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self.scalar("Q") for _ in range(dimensions)]))
        return name, shape, self.scalar("I"), self.scalar("Q")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise self.broken(f"a value is of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind]}"
            if count > len(self.content):
                raise self.cut_short(f"an array has {count:,} values")
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        return [self.value(kind) for _ in range(count)]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"a string is no UTF-8 text ({error.reason})") from None

    def scalar(self, form: str) -> Any:
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.content):
            raise self.cut_short("its header goes on behind the end of the file")
        data = self.content[self.at : end]
        self.at = end
        return data

    def broken(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}: the file is broken; download or convert it again.")

    def cut_short(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is cut short: {what}; download it again.")


def _block_sizes(path: Path) -> dict[int, tuple[str, int, int]]:
    """Returns the name, weights and bytes of a block of each of ggml's tensor types, by id.

    Raises ModelError if the package that knows them is missing. It takes a while to import, so only GGUF files pay.
    """
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError:
        raise ModelError(f"{path}: reading GGUF files needs the package gguf: pip install gguf.") from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
