"""Stores the hidden states that a draft reads in pages beside those of the KV cache, under the same ids.

So prefix cache hits, forks and swapped sequences have them, and the draft may read a text whenever it is to guess.
"""

import torch
from torch import Tensor

from mini_infer_engine.core.batch import PageCopy, Transfers
from mini_infer_engine.runtime.memory.page_swaps import swap_rows
from mini_infer_engine.runtime.memory.zero_memory import zeros


class HiddenPages:
    """The hidden states of one pool's tokens, with a null page after the others, whose contents mean nothing."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_pages: int = 0,
    ) -> None:
        self.pages = zeros((num_pages + 1, page_size, width), dtype, device)
        self.host_pages = torch.empty((num_host_pages, page_size, width), dtype=dtype, pin_memory=device.type == "cuda")
        self.rows = self.pages.view(-1, width)
        """The states of all tokens, at page * page_size + offset."""
        self.page_size = page_size
        self._null_row = num_pages * page_size

    def write(self, kv_index: Tensor, states: Tensor) -> None:
        """Stores states [tokens, width] at kv_index [tokens], page * page_size + offset; negative: nowhere."""
        self.rows.index_copy_(0, self._places(kv_index), states)

    def read(self, kv_index: Tensor) -> Tensor:
        """Returns the states [tokens, width] at kv_index [tokens] in new memory; zeros for negative ones."""
        found = self.rows.index_select(0, self._places(kv_index))
        return found.masked_fill_((kv_index < 0).unsqueeze(1), 0)  # what padding stores may be no number

    def _places(self, kv_index: Tensor) -> Tensor:
        return torch.where(kv_index < 0, self._null_row, kv_index).long()

    def swap(self, transfers: Transfers) -> None:
        """Queues copies to main memory and from there."""
        swap_rows(self.pages, self.host_pages, transfers)

    def copy(self, copies: list[PageCopy]) -> None:
        """Queues copies on the device, one after the other."""
        for copy in copies:
            self.pages[copy.target, : copy.tokens].copy_(self.pages[copy.source, : copy.tokens])


def decode_index(page_table: Tensor, slots: Tensor, kv_lengths: Tensor, page_size: int) -> Tensor:
    """Returns where rows with one new token store it, [rows] int64: -1 in rows whose kv_lengths [rows] are negative.

    page_table [slots, width] is read at slots [rows].
    """
    lengths, width = kv_lengths.long(), page_table.shape[1]
    places = slots.long() * width + (lengths // page_size).clamp(0, width - 1)
    index = page_table.reshape(-1).index_select(0, places).long() * page_size + lengths % page_size
    return torch.where(lengths < 0, -1, index)
