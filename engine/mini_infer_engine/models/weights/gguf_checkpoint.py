"""Reads a GGUF file as a checkpoint: its tensors under Hugging Face's names, dequantised when they are read.

Weights are in the model's dtype from then on: products with 4- and 8-bit blocks would need kernels of their own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.architectures import EXPERT, Change, architecture_of, change_of, checkpoint_name
from mini_infer_engine.gguf.header import ENCODINGS, GgufHeader, GgufTensor
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.weights.checkpoint import StoredTensor


class GgufCheckpoint:
    """Implements `checkpoint.Checkpoint` for a GGUF file.

    `head_dim` is that of q and k, whose rows some converters interleave.
    """

    missing_remedy = "has no counterpart in the GGUF file"

    def __init__(self, path: Path, head_dim: int) -> None:
        """Raises ModelError if the file cannot be read, or the package that dequantises is missing."""
        header = GgufHeader.read(path)
        architecture = architecture_of(header)
        self._sources: dict[str, tuple[GgufTensor, Change]] = {}
        for theirs, tensor in header.tensors.items():
            ours, change = checkpoint_name(architecture, theirs), change_of(architecture, theirs)
            if ours is not None:
                self._sources |= {name: (part, change) for name, part in _parts(ours, tensor)}
        # As float32 whatever it is stored as: that is what reading gives.
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(path, tensor.shape, torch.float32, tensor.name)
            for name, (tensor, _) in self._sources.items()
        }
        self._head_dim = head_dim
        self._dequantize = _dequantizer(path)

    def read(self, file: Path, parts: Mapping[str, Part | None], place: Callable[[str, Tensor], None]) -> None:
        """Dequantises each tensor, undoes the converter's change, and calls `place` with the part."""
        content = np.memmap(file, mode="r")
        for name, part in parts.items():
            tensor, change = self._sources[name]
            values = self._dequantize(content[tensor.begin : tensor.begin + tensor.size], tensor)
            weight = undone(torch.from_numpy(values), change, self._head_dim)
            place(name, weight if part is None else part.of(weight))


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


def undone(weight: Tensor, change: Change, head_dim: int) -> Tensor:
    """Returns a tensor as it was before the conversion to GGUF."""
    if change == "plus_one":
        return weight - 1
    if change == "interleaved_rows":
        # Of each head the converter has put row i of the second half behind row i of the first.
        pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)
    return weight


def _dequantizer(path: Path) -> Callable[[np.ndarray, GgufTensor], np.ndarray]:
    """Returns a function that converts a tensor's bytes to float32 in its shape, in writable memory."""
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError:
        raise ModelError(f"{path}: reading GGUF files needs the package gguf: pip install gguf.") from None

    def run(content: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        _, block, block_bytes = next(entry for entry in ENCODINGS.values() if entry[0] == tensor.encoding)
        rows = content.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        values = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.encoding])
        return np.array(values, dtype=np.float32).reshape(tensor.shape)

    return run
