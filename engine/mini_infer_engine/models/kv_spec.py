"""Computes the shape and size of a page of the KV cache from what a model stores of each token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mini_infer_engine.config.model.kv_groups import uniform_kv_cache
from mini_infer_engine.config.model.model_config import HeadShape

SCALE_DTYPE = torch.bfloat16
"""The dtype of scales of quantised keys and values. It costs no precision: a scale is rounded before it divides."""


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """A format of keys and values with one byte an element, and one scale for each token and KV head."""

    name: str
    dtype: torch.dtype
    largest: float
    """The value to which the largest element of a head is scaled."""


FP8 = KVQuantization("fp8", torch.float8_e4m3fn, 448.0)
INT8 = KVQuantization("int8", torch.int8, 127.0)
KV_QUANTIZATIONS = {"fp8": FP8, "fp8_e4m3": FP8, "int8": INT8}
"""The formats by their names for --kv-cache-dtype."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The content of a page of one sequence, in all layers: keys and values of (grouped-query) attention."""

    num_layers: int
    page_size: int
    """Tokens in a page."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """The dtype in which attention computes."""
    entries: int = 2
    """Entries of a token in a layer: its keys and its values; 1: one latent from which attention makes both."""
    quantization: KVQuantization | None = None
    """The format in which they are stored; None: in `dtype`."""
    head_shapes: tuple[HeadShape, ...] = ()
    """The KV heads of each layer on this rank, if they differ. Then `num_layers` are units of one narrow head."""

    @classmethod
    def mixed(cls, shapes: Sequence[HeadShape], page_size: int, dtype: torch.dtype) -> "KVSpec":
        """Returns the content of a page whose layers have different heads, in units of which all are multiples."""
        widths = [shape.num_kv_heads * shape.head_dim for shape in shapes]
        unit = math.gcd(*widths)
        num_units = uniform_kv_cache(len(shapes), units=[width // unit for width in widths]).layers_per_page
        return cls(num_units, page_size, 1, unit, dtype, head_shapes=tuple(shapes))

    @property
    def layer_units(self) -> tuple[int, ...]:
        """The units of each layer; () if all layers are alike."""
        return tuple(shape.num_kv_heads * shape.head_dim // self.head_dim for shape in self.head_shapes)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The sizes of heads: of all layers, or of each if they differ."""
        return tuple(shape.head_dim for shape in self.head_shapes) or (self.head_dim,)

    def of_shape(self, shape: HeadShape) -> "KVSpec":
        """Returns the content of a page as layers of one shape see it."""
        units = shape.num_kv_heads * shape.head_dim // self.head_dim
        sizes: dict[str, Any] = {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "head_shapes": ()}
        return replace(self, num_layers=self.num_layers // units, **sizes)

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of an element in a page."""
        return self.dtype if self.quantization is None else self.quantization.dtype

    @property
    def row_width(self) -> int:
        """Elements of one token's keys (or values, or latent) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def half_bytes(self) -> int:
        """Bytes of one page's keys (or values, or latents) in one layer, with their scales."""
        scales = 0 if self.quantization is None else self.num_kv_heads * SCALE_DTYPE.itemsize
        return self.page_size * (self.row_width * self.storage_dtype.itemsize + scales)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * self.entries * self.half_bytes
