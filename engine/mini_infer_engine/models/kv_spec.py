"""What a model keeps of each token for attention: the shape of a page of the KV cache."""

from dataclasses import dataclass

import torch

SCALE_DTYPE = torch.bfloat16
"""Of quantised keys and values: the scale is rounded before values are divided by it, so that it costs no precision."""


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """Keys and values of one byte an element, with one scale for each token and KV head."""

    name: str
    dtype: torch.dtype
    largest: float
    """What the largest element of a head becomes."""


FP8 = KVQuantization("fp8", torch.float8_e4m3fn, 448.0)
INT8 = KVQuantization("int8", torch.int8, 127.0)
KV_QUANTIZATIONS = {"fp8": FP8, "fp8_e4m3": FP8, "int8": INT8}
"""By the names that --kv-cache-dtype has for them."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one page of one sequence holds, in all layers: keys and values of multi-head or grouped-query attention."""

    num_layers: int
    page_size: int
    """Tokens a page."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of what attention computes with."""
    entries: int = 2
    """Of a token in a layer: its keys and its values; 1: one latent from which attention makes both."""
    quantization: KVQuantization | None = None
    """How they are stored; None: as they are."""

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of an element in a page."""
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
