"""What a model keeps of each token for attention: the shape of a page of the KV cache."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one page of one sequence holds, in all layers: keys and values of multi-head or grouped-query attention."""

    num_layers: int
    page_size: int
    """Tokens a page."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    entries: int = 2
    """Of a token in a layer: its keys and its values; 1: one latent from which attention makes both."""

    @property
    def row_width(self) -> int:
        """Elements of one token's keys (or values, or latent) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * self.entries * self.page_size * self.row_width * self.dtype.itemsize
