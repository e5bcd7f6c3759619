"""What a model keeps of each token for attention: the shape of a page of the KV cache."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of multi-head or grouped-query attention: what one page of one sequence holds, in all layers."""

    num_layers: int
    page_size: int
    """Tokens a page."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_width(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * 2 * self.page_size * self.row_width * self.dtype.itemsize
