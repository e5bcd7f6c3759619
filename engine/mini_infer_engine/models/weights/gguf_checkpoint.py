"""Reads a GGUF file as a checkpoint: its tensors under Hugging Face's names, dequantised when they are read.

Matrices that the model keeps packed are read as the bytes of their blocks.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.architectures import architecture_of
from mini_infer_engine.gguf.header import GgufHeader, GgufTensor
from mini_infer_engine.gguf.translation import (
    EXPERT,
    Architecture,
    Change,
    Fusion,
    Metadata,
    change_of,
    checkpoint_name,
    layer_of,
    num_layers,
)
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.weights.checkpoint import StoredTensor
from mini_infer_engine.models.weights.gguf_changes import MXFP4_BLOCK_BYTES, ROW_CHANGES, Layout, reads_bytes, undone


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors of a file of which one of the checkpoint is made."""

    parts: tuple[GgufTensor, ...]
    change: Change

    def stored(self, path: Path, layout: Layout) -> StoredTensor:
        """Returns the tensor that reading gives: float32 whatever it is stored as, or bytes that stay as they are.

        Raises ModelError if parts do not fit each other.
        """
        dtype = torch.uint8 if reads_bytes(self.change) else torch.float32
        empty = [torch.empty(self._shape(part), dtype=dtype, device="meta") for part in self.parts]
        names = " and ".join(part.name for part in self.parts)
        try:
            shape = tuple(undone(empty, self.change, layout).shape)
        except RuntimeError as error:
            if len(self.parts) > 1:
                shapes = [list(part.shape) for part in self.parts]
                raise ModelError(f"{path}: tensors {names} have shapes {shapes}, which do not fit.") from error
            shape = self.parts[0].shape  # of which the model says that it does not fit
        return StoredTensor(path, shape, dtype, names, sum(part.size for part in self.parts))

    def read(self, content: np.ndarray, layout: Layout) -> Tensor:
        """Returns the tensor out of the bytes of a file."""
        parts = []
        for part in self.parts:
            raw = content[part.begin : part.begin + part.size]
            if reads_bytes(self.change):
                parts.append(torch.from_numpy(np.array(raw).reshape(self._shape(part))))
            else:
                parts.append(torch.from_numpy(_dequantized(raw, part)))
        return undone(parts, self.change, layout)

    @property
    def has_plain_rows(self) -> bool:
        """True if it is one matrix of the file, with its rows in this or another order."""
        return len(self.parts) == 1 and len(self.parts[0].shape) == 2 and self.change in ROW_CHANGES

    def read_packed(self, content: np.ndarray, layout: Layout) -> Tensor:
        """Returns the bytes of a matrix, [rows, bytes of a row], in the checkpoint's order of rows."""
        [part] = self.parts
        raw = np.array(content[part.begin : part.begin + part.size])
        return undone([torch.from_numpy(raw).view(part.row_bytes)], self.change, layout)

    def _shape(self, part: GgufTensor) -> tuple[int, ...]:
        if not reads_bytes(self.change):
            return part.shape
        blocks = part.size * part.shape[-1] // (MXFP4_BLOCK_BYTES * math.prod(part.shape))
        return (*part.shape[:-1], blocks, MXFP4_BLOCK_BYTES)


class GgufCheckpoint:
    """Implements `checkpoint.Checkpoint` for a GGUF file.

    `head_dim` is that of q and k, whose rows some converters interleave.
    """

    missing_remedy = "has no counterpart in the GGUF file"

    def __init__(self, path: Path, head_dim: int) -> None:
        """Raises ModelError if the file cannot be read, or the package `gguf` is missing."""
        header = GgufHeader.read(path)
        metadata = Metadata(header)
        self._layout = Layout.of(head_dim, metadata)
        self._sources = _sources(header, architecture_of(header), num_layers(metadata))
        self.tensors: Mapping[str, StoredTensor] = {
            name: source.stored(path, self._layout) for name, source in self._sources.items()
        }
        self._packed: frozenset[str] = frozenset()

    @property
    def encodings(self) -> Mapping[str, str]:
        """The encoding of each matrix that can be read as bytes, by ggml's name."""
        return {name: source.parts[0].encoding for name, source in self._sources.items() if source.has_plain_rows}

    def keep_packed(self, names: Collection[str]) -> None:
        """Has these matrices, which `encodings` names, read as bytes [rows, bytes of a row]."""
        self._packed = frozenset(names)
        stored = {}
        for name in names:
            [part] = self._sources[name].parts
            stored[name] = replace(self.tensors[name], shape=part.row_bytes, dtype=torch.uint8)
        self.tensors = {**self.tensors, **stored}

    def read(self, file: Path, parts: Mapping[str, Part | None], place: Callable[[str, Tensor], None]) -> None:
        """Dequantises each tensor unless it stays packed, undoes the converter's change, and calls `place` with the
        part.
        """
        content = np.memmap(file, mode="r")
        for name, part in parts.items():
            source = self._sources[name]
            read = source.read_packed if name in self._packed else source.read
            weight = read(content, self._layout)
            place(name, weight if part is None else part.of(weight))


def _sources(header: GgufHeader, architecture: Architecture, layers: int) -> dict[str, _Source]:
    """Returns the sources by the checkpoint's names. Layers that predict further tokens are left out."""
    tensors = {name: tensor for name, tensor in header.tensors.items() if (layer_of(name) or 0) < layers}
    found: dict[str, _Source] = {}
    fused: set[str] = set()
    for layer in range(layers if architecture.fusions else 0):
        for fusion in _fusions(architecture.fusions, layer, tensors):
            names = [f"blk.{layer}.{part}" for part in fusion.parts]
            found[f"model.layers.{layer}.{fusion.name}"] = _Source(
                tuple(tensors[name] for name in names), fusion.change
            )
            fused.update(names)
    for theirs, tensor in tensors.items():
        ours, change = checkpoint_name(architecture, theirs), change_of(architecture, theirs)
        if ours is not None and theirs not in fused:
            found |= {name: _Source((part,), change) for name, part in _parts(ours, tensor)}
    return found


def _fusions(fusions: tuple[Fusion, ...], layer: int, tensors: Mapping[str, GgufTensor]) -> Iterator[Fusion]:
    """Yields the fusions whose parts a layer has."""
    encoded: set[tuple[str, ...]] = set()
    for fusion in fusions:
        parts = [tensors.get(f"blk.{layer}.{part}") for part in fusion.parts]
        if fusion.encoding is not None:
            if all(part is not None and part.encoding == fusion.encoding for part in parts):
                encoded.add(fusion.parts)
                yield fusion
        elif all(part is not None for part in parts) and fusion.parts not in encoded:
            yield fusion


def _parts(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yields a tensor under its name, or, for a stack of experts, each expert under its own."""
    if EXPERT not in name:
        yield name, tensor
        return
    experts, *shape = tensor.shape
    size = tensor.size // experts
    for expert in range(experts):
        part = replace(tensor, shape=tuple(shape), begin=tensor.begin + expert * size, size=size)
        yield name.replace(EXPERT, str(expert)), part


def _dequantized(content: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """Returns a tensor's bytes as float32 in its shape, in writable memory."""
    from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

    encoding = GGMLQuantizationType[tensor.encoding]
    rows = content.reshape(quant_shape_to_byte_shape(tensor.shape, encoding))
    return np.array(dequantize(np.ascontiguousarray(rows), encoding), dtype=np.float32).reshape(tensor.shape)
