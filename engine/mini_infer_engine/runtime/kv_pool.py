"""The page pool: keys and values of every layer, in pages. It knows addresses, not sequences.

All layers of a page lie together so that a page is one piece to copy, swap or send; a layer is read through strides.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.core.batch import PageCopy


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one page holds."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(config: ModelConfig, page_size: int, dtype: torch.dtype) -> "KVShape":
        """The shape for a model."""
        return KVShape(config.num_layers, page_size, config.num_kv_heads, config.head_dim, dtype)

    @property
    def row_width(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * 2 * self.page_size * self.row_width * self.dtype.itemsize


class KVPool:
    """`num_pages` pages for the scheduler and one more, `null_page`, that pads page tables and is never written."""

    def __init__(self, shape: KVShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.null_page = num_pages
        sizes = (num_pages + 1, shape.num_layers, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # [pages, layers, keys or values, page_size, kv_heads, head_dim]
        self.pages = zeros(sizes, shape.dtype, device)
        self.tokens = self.pages.view(-1, shape.row_width)
        self.half_pages = self.pages.view((num_pages + 1) * shape.num_layers * 2, -1)
        self._scratch = self.half_pages[:0]
        self._halves = torch.arange(shape.num_layers * 2, device=device).view(-1, 1, 2)  # keys, values of each layer

    def copy(self, copies: list[PageCopy]) -> None:
        """Copy the first tokens of pages to other pages, all layers. One after the other: a target may be a source."""
        for copy in copies:
            self.pages[copy.target, :, :, : copy.tokens].copy_(self.pages[copy.source, :, :, : copy.tokens])

    def token_rows_of(self, pages: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        """For each layer, rows of `tokens` for tokens at (page, offset): keys and values of the first, of ..."""
        tokens_in_page = self.shape.num_layers * 2 * self.shape.page_size
        rows = (pages * tokens_in_page + offsets).unsqueeze(1) + self._halves * self.shape.page_size
        return rows.flatten(1).unbind(0)

    def gather_rows(self, page_tables: Tensor) -> tuple[Tensor, ...]:
        """Rows of `half_pages` for each layer, keys first, for page ids of any shape, flattened."""
        rows = page_tables.reshape(-1) * (2 * self.shape.num_layers) + self._halves.mT
        return rows.flatten(1).unbind(0)

    def gather(self, rows: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer for sequences of equally many pages, [sequences, tokens, kv_heads, head_dim].

        They stand in memory that the next call overwrites: fresh memory for each layer costs a CPU more in page faults
        than the copy itself.
        """
        if self._scratch.shape[0] < rows.shape[0]:
            self._scratch = self.half_pages.new_empty(rows.shape[0] * 5 // 4, self.half_pages.shape[1])
        halves = torch.index_select(self.half_pages, 0, rows, out=self._scratch[: rows.shape[0]])
        keys, values = halves.view(2, num_sequences, -1, self.shape.num_kv_heads, self.shape.head_dim).unbind(0)
        return keys, values


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because attention multiplies masked values by 0 and 0 * NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    # numpy asks the kernel for zero pages, so that a pool costs memory only where it is used; torch.zeros writes all.
    raw = np.zeros(int(np.prod(sizes)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(sizes)
