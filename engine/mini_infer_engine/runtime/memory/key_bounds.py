"""Stores the bounds of each page's keys beside the pages of the KV cache, under the same ids, for page selection.

The bounds are made when a page is complete, of all of its keys: a page that is not is the newest of its sequence, which
is attended to without them. So prefix cache hits, forks and swapped sequences have them.
"""

import torch
from torch import Tensor

from mini_infer_engine.config.options.kv_selection import DENSE_LAYERS
from mini_infer_engine.core.batch import PageCopy, Transfers
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.runtime.memory.page_swaps import swap_rows
from mini_infer_engine.runtime.memory.zero_memory import zeros


class KeyBounds:
    """The bounds of one pool's keys, and the number of pages that a decode attends to."""

    def __init__(
        self, spec: KVSpec, num_pages: int, budget_pages: int, device: torch.device, num_host_pages: int = 0
    ) -> None:
        self.budget_pages = budget_pages
        sizes = (_layers(spec), spec.num_kv_heads, 2, spec.head_dim)
        # [pages and a null page, layers that select, kv_heads, smallest and largest element, head_dim]
        self.pages = zeros((num_pages + 1, *sizes), spec.dtype, device)
        self.host_pages = torch.empty((num_host_pages, *sizes), dtype=spec.dtype, pin_memory=device.type == "cuda")

    @property
    def form(self) -> str:
        """Names the layout of bounds, and the budget, on which keys and values of answers depend."""
        return f"bounds {tuple(self.pages.shape[1:])}, {self.budget_pages} pages selected"

    @staticmethod
    def page_bytes(spec: KVSpec) -> int:
        """Returns the bytes of a page's bounds."""
        return _layers(spec) * 2 * spec.row_width * spec.dtype.itemsize

    def of_layer(self, layer: int) -> Tensor | None:
        """Returns the bounds of a layer [pages, kv_heads, 2, head_dim]; None if its decodes attend to all pages."""
        return None if layer < DENSE_LAYERS else self.pages[:, layer - DENSE_LAYERS]

    def swap(self, transfers: Transfers) -> None:
        """Queues copies to main memory and from there."""
        swap_rows(self.pages, self.host_pages, transfers)

    def copy(self, copies: list[PageCopy]) -> None:
        """Queues copies on the device, one after the other. Those of a part of a page mean nothing until its copy is
        complete, when they are made anew.
        """
        for copy in copies:
            self.pages[copy.target].copy_(self.pages[copy.source])


def _layers(spec: KVSpec) -> int:
    return max(0, spec.num_layers - DENSE_LAYERS)
