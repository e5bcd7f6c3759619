"""Reads safetensors of MLX's, bitsandbytes' and HQQ's forms as unquantised tensors, dequantised when they are read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.quantization.widened import HQQ_BITS, WidenedForm
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.weights.checkpoint import StoredTensor
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint, read_whole

_MLX_BITS = (2, 3, 4, 5, 6, 8)
_WORD_BITS = 32
_BNB_STATE = ".quant_state.bitsandbytes__"
_BNB_8_BITS = ".SCB"
_INT8_MOST = 127.0
_HQQ_VALUES = ".W_q"
_HQQ_PARTS = frozenset(
    {
        *("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "channel_wise", "optimize"),
        *("round_zero", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype"),
        *("offload_meta", "encoded_state_dict", "stores_quant_config"),
    }
)
"""The tensors of a layer in HQQ's state beside its bias."""
_Read = Callable[[str], Tensor]


class _Quantised(Protocol):
    """One weight that is several tensors of the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""

    def dequantized(self, read: _Read) -> Tensor:
        """Returns the weight in fp32."""


@dataclass(frozen=True, slots=True)
class _Affine:
    """MLX's form: integer * scale + bias, by groups of columns. Integers are a stream of bits from the lowest on."""

    path: str
    shape: tuple[int, ...]
    bits: int

    def dequantized(self, read: _Read) -> Tensor:
        """Returns the weight in fp32."""
        integers = _unpacked(read(f"{self.path}.weight"), self.bits)
        scales, biases = (read(f"{self.path}.{name}").float().unsqueeze(-1) for name in ("scales", "biases"))
        groups = integers.view(*scales.shape[:-1], -1).float()
        return (groups * scales + biases).view(self.shape)


@dataclass(frozen=True, slots=True)
class _FourBits:
    """bitsandbytes' nf4 and fp4 (Dettmers et al. 2023, arXiv 2305.14314): a table's value times its block's scale.

    Scales may be quantised themselves.
    """

    path: str
    shape: tuple[int, ...]
    state: Mapping[str, Any]

    def dequantized(self, read: _Read) -> Tensor:
        """Returns the weight in fp32."""
        packed = read(f"{self.path}.weight").flatten()
        indexes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
        values = read(f"{self.path}.weight.quant_map").float()[indexes]
        scales = self._scales(read)
        size = int(self.state["blocksize"])
        widened = scales.repeat_interleave(size)[: len(values)]
        return (values * widened).view(self.shape)

    def _scales(self, read: _Read) -> Tensor:
        scales = read(f"{self.path}.weight.absmax")
        if scales.dtype != torch.uint8:
            return scales.float()
        nested = read(f"{self.path}.weight.nested_absmax").float()
        table = read(f"{self.path}.weight.nested_quant_map").float()
        size = int(self.state["nested_blocksize"])
        outer = nested.repeat_interleave(size)[: len(scales)]
        return table[scales.long()] * outer + float(self.state["nested_offset"])


@dataclass(frozen=True, slots=True)
class _EightBits:
    """bitsandbytes' LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): a scale for each row."""

    path: str
    shape: tuple[int, ...]

    def dequantized(self, read: _Read) -> Tensor:
        """Returns the weight in fp32."""
        scales = read(f"{self.path}{_BNB_8_BITS}").float() / _INT8_MOST
        return read(f"{self.path}.weight").float() * scales.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class _HalfQuadratic:
    """HQQ's form (Badri and Shaji 2023, half-quadratic quantization): (integer - zero) * scale, by groups.

    Groups are rows of the packed matrix, or its columns, before it gets the weight's shape. Its rows share bytes with
    those of its other half, or quarters; the first are in the highest bits.
    """

    path: str
    shape: tuple[int, ...]
    bits: int

    def dequantized(self, read: _Read) -> Tensor:
        """Returns the weight in fp32."""
        packed = read(f"{self.path}{_HQQ_VALUES}")
        mask = (1 << self.bits) - 1
        integers = torch.cat([(packed >> shift) & mask for shift in range(8 - self.bits, -1, -self.bits)])
        scale, zero = (read(f"{self.path}.{name}").float() for name in ("scale", "zero"))
        return ((integers.float() - zero) * scale).reshape(self.shape)


class WidenedCheckpoint(SafetensorsCheckpoint):
    """Presents quantised weights as those that they stand for."""

    def __init__(self, directory: Path, form: WidenedForm, *, reads_images: bool = False) -> None:
        """Raises ModelError if a file is missing or broken, or a weight's tensors do not fit each other."""
        super().__init__(directory, reads_images=reads_images)
        self._stored = self.tensors
        finders = {"mlx": self._affine, "bitsandbytes": self._bitsandbytes, "hqq": self._half_quadratic}
        self._weights = finders[form.kind](form)
        parts = tuple(f"{name}." for name in self._weights)
        others = _HQQ_PARTS if form.kind == "hqq" else ("scales", "biases", "SCB", "weight_format")
        hidden = {f"{path}.{part}" for path in self._paths() for part in others}
        plain = {
            name: tensor for name, tensor in self._stored.items() if name not in hidden and not name.startswith(parts)
        }
        self.tensors = plain | {name: self._widened(name) for name in self._weights}

    def _paths(self) -> list[str]:
        return [name.removesuffix(".weight") for name in self._weights]

    def _widened(self, name: str) -> StoredTensor:
        values = f"{name.removesuffix('.weight')}{_HQQ_VALUES}"
        stored = self._stored.get(name) or self._stored[values]
        size = stored.bytes_read(None)
        return StoredTensor(stored.file, self._weights[name].shape, torch.float32, stored.stored_as, size)

    def read(self, file: Path, parts: Mapping[str, Part | None], place: Callable[[str, Tensor], None]) -> None:
        """Reads tensors of one file, dequantised where they are quantised, and calls `place` with each."""
        super().read(file, {name: part for name, part in parts.items() if name not in self._weights}, place)
        for name, part in parts.items():
            if name in self._weights:
                weight = self._weights[name].dequantized(self._whole)
                place(name, weight if part is None else part.of(weight))

    def are_equal(self, first: str, second: str) -> bool:
        """Returns True if two matrices have the same numbers."""
        if first not in self._weights and second not in self._weights:
            return super().are_equal(first, second)
        both = [
            self._weights[name].dequantized(self._whole) if name in self._weights else self._whole(name).float()
            for name in (first, second)
        ]
        return torch.equal(*both)

    def _whole(self, name: str) -> Tensor:
        """Reads one tensor of the checkpoint as it is stored. Raises ModelError if it is missing."""
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"tensor {name}, of a quantised weight, is in no safetensors file.")
        return read_whole(stored)

    def _affine(self, form: WidenedForm) -> dict[str, _Quantised]:
        """Finds MLX's weights: those with scales and biases beside them."""
        weights: dict[str, _Quantised] = {}
        for name in self._stored:
            path = name.removesuffix(".scales")
            packed, biases = self._stored.get(f"{path}.weight"), self._stored.get(f"{path}.biases")
            if path == name or packed is None or packed.dtype != torch.uint32:
                continue
            scales = self._stored[name]
            group = form.group_sizes.get(scales.stored_as.removesuffix(".scales"), form.group_size)
            columns = scales.shape[-1] * group
            bits, rest = divmod(packed.shape[-1] * _WORD_BITS, columns or 1)
            if biases is None or biases.shape != scales.shape or packed.shape[:-1] != scales.shape[:-1]:
                raise _unfit(packed, "its scales and biases must have a number for each row and group")
            if rest or bits not in _MLX_BITS:
                raise _unfit(packed, f"shape {list(packed.shape)} is none of groups of {group} columns")
            weights[f"{path}.weight"] = _Affine(path, (*packed.shape[:-1], columns), bits)
        return weights

    def _bitsandbytes(self, form: WidenedForm) -> dict[str, _Quantised]:
        """Finds bitsandbytes' weights: those with the state of their quantisation, or with scales, beside them."""
        del form
        weights: dict[str, _Quantised] = {}
        for name, stored in self._stored.items():
            weight, has_state, _ = name.partition(_BNB_STATE)
            if has_state and weight in self._stored:
                state = self._state(name)
                shape = tuple(state["shape"])
                packed = self._stored[weight]
                if packed.dtype != torch.uint8 or 2 * packed.bytes_read(None) != int(np.prod(shape)):
                    raise _unfit(packed, f"it does not pack the {list(shape)} numbers of {stored.stored_as}")
                weights[weight] = _FourBits(weight.removesuffix(".weight"), shape, state)
            elif name.endswith(_BNB_8_BITS):
                path = name.removesuffix(_BNB_8_BITS)
                integers = self._stored.get(f"{path}.weight")
                if integers is None or integers.dtype != torch.int8 or integers.shape[:1] != stored.shape:
                    raise _unfit(stored, "there are no integers of as many rows")
                order = f"{path}.weight_format"
                if order in self._stored and self._whole(order).any():
                    raise _unfit(self._stored[order], "integers in another order than by rows are not read")
                weights[f"{path}.weight"] = _EightBits(path, integers.shape)
        return weights

    def _half_quadratic(self, form: WidenedForm) -> dict[str, _Quantised]:
        """Finds HQQ's weights: those with packed integers, their scales, zeros and shape."""
        del form
        weights: dict[str, _Quantised] = {}
        for name, packed in self._stored.items():
            path = name.removesuffix(_HQQ_VALUES)
            if path == name:
                continue
            parts = {part: self._stored.get(f"{path}.{part}") for part in ("scale", "zero", "shape", "nbits")}
            if missing := [part for part, tensor in parts.items() if tensor is None]:
                raise _unfit(packed, f"its {missing[0]} is missing, or quantised, too, which is not read")
            shape = tuple(self._whole(f"{path}.shape").flatten().tolist())
            bits = int(self._whole(f"{path}.nbits").flatten()[0])
            if packed.dtype != torch.uint8 or bits not in HQQ_BITS:
                raise _unfit(packed, f"{bits} bits as {packed.dtype}: of HQQ 8, 4 and 2 bits in bytes are read")
            rows, columns = packed.shape[0] * (8 // bits), packed.shape[1] if len(packed.shape) == 2 else 0
            scale = parts["scale"]
            assert scale is not None
            if rows * columns != int(np.prod(shape)) or scale.shape not in ((rows, 1), (1, columns), (1, 1)):
                raise _unfit(
                    packed, f"shapes {list(packed.shape)} and {list(scale.shape)} are not those of {list(shape)}"
                )
            weights[f"{path}.weight"] = _HalfQuadratic(path, shape, bits)
        return weights

    def _state(self, name: str) -> dict[str, Any]:
        """Returns the JSON of a weight's state. Raises ModelError if it is not one."""
        try:
            state: dict[str, Any] = json.loads(bytes(self._whole(name).tolist()))
            sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
            if not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ValueError("sizes must be positive")
            float(state.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError) as error:
            raise _unfit(self._stored[name], f"it is no state of bitsandbytes ({error!r})") from None
        return state


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the integers [..., columns] of a stream of bits in words, the lowest bits first."""
    content = words.view(torch.uint8)
    if bits == 8:
        return content
    if 8 % bits == 0:
        mask, shifts = (1 << bits) - 1, range(0, 8, bits)
        return torch.stack([(content >> shift) & mask for shift in shifts], dim=-1).flatten(-2)
    stream = np.unpackbits(content.numpy(), axis=-1, bitorder="little")
    planes = torch.from_numpy(stream).view(*content.shape[:-1], -1, bits)
    return sum((planes[..., place] << place for place in range(bits)), torch.zeros_like(planes[..., 0]))


def _unfit(tensor: StoredTensor, reason: str) -> ModelError:
    what = f"{tensor.file}: tensor {tensor.stored_as}: {reason}"
    return ModelError(f"{what}: the checkpoint is broken; download it again.")
