"""Describes a checkpoint as named tensors on disk, and compares them with a model before memory is allocated.

Knows no file format: `safetensors_checkpoint` and `gguf_checkpoint` do.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.layers.placement import Part, Placement


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that has not been read, with the shape and dtype that reading returns."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_as: str = ""
    """The file's own name of the tensor, if it differs."""
    encoded_bytes: int | None = None
    """Bytes of the tensor in the file; None: those of shape and dtype."""
    begin: int | None = None
    """Offset of its first byte in the file; None if it is not stored as it is read."""

    def bytes_read(self, part: Part | None) -> int:
        """Returns the bytes that are read of the file for a part (None: all of it). Encoded tensors are read whole."""
        if self.encoded_bytes is not None:
            return self.encoded_bytes
        whole = math.prod(self.shape) * self.dtype.itemsize
        return whole if part is None else whole * part.shard.count // part.shard.total


class Checkpoint(Protocol):
    """Weights on disk."""

    tensors: Mapping[str, StoredTensor]
    """The tensors by their names in Hugging Face's checkpoints."""
    missing_remedy: str
    """The end of the error message about a missing tensor, such as "is in no safetensors file"."""

    def read(self, file: Path, parts: Mapping[str, Part | None], place: Callable[[str, Tensor], None]) -> None:
        """Calls `place` with these parts (None: all) of tensors of one file. Several threads may call it."""


def check_fit(
    checkpoint: Checkpoint,
    directory: Path,
    expected: Mapping[str, Placement],
    architecture: str,
    is_unused: Callable[[str], bool],
) -> None:
    """Compares names, shapes and dtypes. Only headers are read, and placements may be without memory.

    Raises:
        ModelError: a tensor is missing, unknown, or has another shape or dtype than the config requires.
    """
    found = checkpoint.tensors
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelError(f"{directory}: tensor {missing[0]} {checkpoint.missing_remedy}{_and_more(missing)}.")
    others = (name for name in found.keys() - expected.keys() if not is_unused(name))
    unknown = sorted(name for name in others if 0 not in found[name].shape)  # transformers writes zero experts, too
    if unknown:
        tensor = found[unknown[0]]
        raise ModelError(
            f"{tensor.file}: tensor {_label(unknown[0], tensor)} has no place in {architecture}{_and_more(unknown)}."
        )
    for name, placement in expected.items():
        tensor = found[name]
        if (obstacle := placement.obstacle(tensor.shape, tensor.dtype)) is not None:
            raise ModelError(f"{tensor.file}: tensor {_label(name, tensor)} {obstacle}.")


def _label(name: str, tensor: StoredTensor) -> str:
    return f"{tensor.stored_as} ({name})" if tensor.stored_as and tensor.stored_as != name else name


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
