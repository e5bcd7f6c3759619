"""Reads safetensors files as a checkpoint: one file, several, or shards that an index lists.

Files are chosen as transformers chooses them: model.safetensors takes precedence over an index, and files beside a
whole checkpoint (an adapter, the same weights under Mistral's names) are not read.
"""

import json
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.weights.checkpoint import StoredTensor
from mini_infer_engine.models.weights.tensor_names import model_names

log = logging.getLogger(__name__)

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HQQ = "qmodel.pt"
_BESIDE = ("adapter_model", "consolidated")
_MOST_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""
_COMPARED_ROWS = 4096
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsCheckpoint:
    """Implements `checkpoint.Checkpoint` for safetensors files."""

    missing_remedy = "is in no safetensors file"

    def __init__(self, directory: Path, *, is_text_model: bool = True, reads_images: bool = False) -> None:
        """Raises ModelError if a file is missing or broken, or the index and the files differ.

        `is_text_model` is False for weights that are not a whole model, whose names stay as they are. `reads_images`
        adds the vision encoder's to those of a text model.
        """
        places = _indexed(directory)
        headers = {path: _header(path) for path in _files(directory, places)}
        stored = {name: tensor for tensors in headers.values() for name, tensor in tensors.items()}
        if places is not None:
            stored = {name: _placed(headers[path], name, path) for name, path in places.items()}
        names = {name: name for name in stored}
        if is_text_model:
            names = model_names(stored, reads_images=reads_images)
        self.tensors: Mapping[str, StoredTensor] = {
            ours: replace(stored[theirs], stored_as=theirs) for theirs, ours in names.items()
        }

    def read(self, file: Path, parts: Mapping[str, Part | None], place: Callable[[str, Tensor], None]) -> None:
        """Reads tensors of one file, whole or a part, and calls `place` with each."""
        with _open(file) as opened:
            for name, part in parts.items():
                stored_as = self.tensors[name].stored_as
                place(name, opened.get_tensor(stored_as) if part is None else part.of(opened.get_slice(stored_as)))

    def are_equal(self, first: str, second: str) -> bool:
        """Returns True if two matrices have the same numbers. They are read some rows at a time."""
        tensors = self.tensors[first], self.tensors[second]
        if tensors[0].shape != tensors[1].shape or tensors[0].dtype != tensors[1].dtype:
            return False
        with _open(tensors[0].file) as one, _open(tensors[1].file) as other:
            rows, others = one.get_slice(tensors[0].stored_as), other.get_slice(tensors[1].stored_as)
            return all(
                torch.equal(rows[start : start + _COMPARED_ROWS], others[start : start + _COMPARED_ROWS])
                for start in range(0, tensors[0].shape[0], _COMPARED_ROWS)
            )


def read_whole(stored: StoredTensor) -> Tensor:
    """Reads one tensor of a safetensors file as it is stored."""
    with _open(stored.file) as opened:
        tensor: Tensor = opened.get_tensor(stored.stored_as)
    return tensor


def _indexed(directory: Path) -> dict[str, Path] | None:
    """Maps tensor names to files by the index, or returns None if there is none or model.safetensors replaces it."""
    index = directory / _INDEX
    if not index.exists():
        return None
    if (directory / _WHOLE).is_file():
        log.warning("%s has %s and %s: the weights are read from the first", directory, _WHOLE, _INDEX)
        return None
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if outside := [file for file in weight_map.values() if Path(file).name != file]:
            raise ModelError(f"{index} names {outside[0]!r}: weights must be files of the same folder.")
        return {name: directory / file for name, file in weight_map.items()}
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read ({error!r}): download it again.") from None


def _files(directory: Path, places: Mapping[str, Path] | None) -> list[Path]:
    if places is not None:
        if absent := sorted(file for file in set(places.values()) if not file.is_file()):
            raise ModelError(f"{absent[0]} is missing, and {_INDEX} names it: download it.")
        return sorted(set(places.values()))
    if (directory / _WHOLE).is_file():
        return [directory / _WHOLE]
    if paths := sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(_BESIDE)):
        return paths
    if (directory / _HQQ).exists():
        raise ModelError(
            f"{directory / _HQQ} is HQQ's form, which is not read: use the original weights with --quantization int4."
        )
    raise ModelError(f"{directory} has no safetensors file: convert other formats to model.safetensors first.")


def _placed(header: Mapping[str, StoredTensor], name: str, path: Path) -> StoredTensor:
    if name not in header:
        raise ModelError(f"{path}: tensor {name} is not in this file, although {_INDEX} says so.")
    return header[name]


def _header(path: Path) -> dict[str, StoredTensor]:
    with _open(path):
        pass  # its own checks: offsets, sizes, a file that was cut short
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entries: dict[str, Any] = json.loads(file.read(min(size, _MOST_HEADER_BYTES)))
    entries.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + size) for name, entry in entries.items()}


def _stored(path: Path, name: str, entry: Mapping[str, Any], data_begin: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ModelError(
            f"{path}: tensor {name} is {entry['dtype']}: this form of quantised checkpoint is not supported; "
            "use the original weights."
        )
    begin = data_begin + entry["data_offsets"][0]
    return StoredTensor(path, tuple(entry["shape"]), _DTYPES[entry["dtype"]], begin=begin)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is no readable safetensors file ({error}): it may be cut short; download it again."
        ) from None
