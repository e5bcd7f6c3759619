"""Reads a GGUF file as a checkpoint: its tensors under Hugging Face's names, dequantised when they are read.

Weights are in the model's dtype from then on: products with 4- and 8-bit blocks would need kernels of their own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.gguf.architectures import EXPERT, Change, architecture_of, change_of, checkpoint_name
from mini_infer_engine.gguf.header import GgufHeader, GgufTensor
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.weights.checkpoint import StoredTensor


class GgufCheckpoint:
    """Implements `checkpoint.Checkpoint` for a GGUF file.

    `head_dim` is that of q and k, whose rows some converters interleave.
    """

    missing_remedy = "has no counterpart in the GGUF file"

    def __init__(self, path: Path, head_dim: int) -> None:
        """Raises ModelError if the file cannot be read, or the package `gguf` is missing."""
        header = GgufHeader.read(path)
        architecture = architecture_of(header)
        self._sources: dict[str, tuple[GgufTensor, Change]] = {}
        for theirs, tensor in header.tensors.items():
            ours, change = checkpoint_name(architecture, theirs), change_of(architecture, theirs)
            if ours is not None:
                self._sources |= {name: (part, change) for name, part in _parts(ours, tensor)}
        # As float32 whatever it is stored as: that is what reading gives.
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(path, tensor.shape, torch.float32, tensor.name, tensor.size)
            for name, (tensor, _) in self._sources.items()
        }
        self._head_dim = head_dim

    def read(self, file: Path, parts: Mapping[str, Part | None], place: Callable[[str, Tensor], None]) -> None:
        """Dequantises each tensor, undoes the converter's change, and calls `place` with the part."""
        content = np.memmap(file, mode="r")
        for name, part in parts.items():
            tensor, change = self._sources[name]
            values = _dequantized(content[tensor.begin : tensor.begin + tensor.size], tensor)
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


def _dequantized(content: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """Returns a tensor's bytes as float32 in its shape, in writable memory."""
    from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

    encoding = GGMLQuantizationType[tensor.encoding]
    rows = content.reshape(quant_shape_to_byte_shape(tensor.shape, encoding))
    return np.array(dequantize(np.ascontiguousarray(rows), encoding), dtype=np.float32).reshape(tensor.shape)
