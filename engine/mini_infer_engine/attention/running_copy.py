"""Keys and values of the decoding sequences side by side, kept from pass to pass: decode attention for fp32 on a CPU.

Gathering a batch's pages in every layer of every pass costs a CPU as much as attending to them, and attending is faster
where the tokens of a head lie together. The copy is a cache: the pool has every token too, and whenever the decode rows
are not last pass's, one token on, it is gathered anew.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.attention.masks import decode_masks
from mini_infer_engine.inputs import PassInputs
from mini_infer_engine.kv_pool import KVPool

MOST_BYTES = 512 * 1024**2
"""Larger batches are gathered a layer at a time."""

_ROOM_TOKENS = 32
"""Space behind the longest sequence: the copy is made anew each time it is used up."""


class RunningCopy:
    """The copy, and for whom it was made."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.slots: list[int] = []
        self.next_starts: list[int] = []
        self.capacity = 0
        self.storage = pool.pages.new_empty(0, pool.shape.head_dim)
        self.layers: list[tuple[Tensor, Tensor]] = []  # keys and values, [rows * kv_heads, capacity, head_dim]

    def follow(self, inputs: PassInputs, windows: set[int | None]) -> "CopiedDecodes | None":
        """Make the copy hold this pass's decode rows; None: there are none, or they are too large for it.

        A row whose token only the device knows continues the sequence that sampled it in this slot, so that slot and
        position identify it. Any other row may belong to a new sequence in an old slot.
        """
        decodes = inputs.num_decodes
        slots, starts = inputs.slots[:decodes], inputs.starts[:decodes]
        if not inputs.changed_slots.isdisjoint(self.slots):
            self.slots = []
        if not decodes:
            return None
        is_next = slots == self.slots and starts == self.next_starts and max(starts) < self.capacity
        if not is_next and not self._gather(inputs, max(starts) + 1):
            self.slots = []
            return None
        self.slots, self.next_starts = slots, [start + 1 for start in starts]
        return CopiedDecodes(self, inputs, windows)

    def _gather(self, inputs: PassInputs, longest: int) -> bool:
        shape, decodes = self.pool.shape, inputs.num_decodes
        num_pages = -(-(longest + _ROOM_TOKENS) // shape.page_size)
        capacity = num_pages * shape.page_size
        num_rows = shape.num_layers * 2 * decodes * shape.num_kv_heads * capacity
        if num_rows * shape.head_dim * shape.dtype.itemsize > MOST_BYTES:
            return False
        if self.storage.shape[0] < num_rows:
            self.storage = self.pool.pages.new_empty(num_rows * 5 // 4, shape.head_dim)
        sizes = (shape.num_layers, 2, decodes, shape.num_kv_heads, capacity, shape.head_dim)
        layers = self.storage[:num_rows].view(sizes)
        tables = inputs.page_tables[:decodes, :num_pages]
        tables = functional.pad(tables, (0, num_pages - tables.shape[1]), value=self.pool.spare_page)
        for layer, rows in zip(layers, self.pool.gather_rows(tables), strict=True):
            keys, values = self.pool.gather(rows, decodes)
            layer[0].copy_(keys.transpose(1, 2))
            layer[1].copy_(values.transpose(1, 2))
        self.capacity = capacity
        self.layers = [(keys, values) for keys, values in layers.flatten(2, 3).unbind(0)]
        return True


class CopiedDecodes:
    """The decode rows of one pass."""

    def __init__(self, copy: RunningCopy, inputs: PassInputs, windows: set[int | None]) -> None:
        shape, self.count = copy.pool.shape, inputs.num_decodes
        self.copy = copy
        self.num_runs = self.count * shape.num_kv_heads
        self.scale = shape.head_dim**-0.5
        self.longest = max(inputs.starts[: self.count]) + 1
        runs = torch.arange(shape.num_layers * 2 * self.num_runs).view(-1, 2, self.count, shape.num_kv_heads)
        rows = runs.transpose(1, 2) * copy.capacity + inputs.positions[: self.count, None, None]
        self.write_rows = rows.flatten(1).unbind(0)  # of each layer: keys and values of the first sequence, of ...
        masks = decode_masks(inputs, self.longest, windows, shape.dtype)
        self.masks = {w: mask.repeat_interleave(shape.num_kv_heads, 0).unsqueeze(1) for w, mask in masks.items()}

    def attend(self, q: Tensor, kv: Tensor, layer: int, window: int | None) -> Tensor:
        """Attend for the first `count` tokens of q, [count, heads * head_dim]; matrix products beat SDPA's kernel."""
        storage, (keys, values) = self.copy.storage, self.copy.layers[layer]
        storage.index_copy_(0, self.write_rows[layer], kv[: self.count].flatten(0, 2))
        grouped = q[: self.count].reshape(self.num_runs, -1, q.shape[-1])
        seen = keys[:, : self.longest].transpose(1, 2)
        scores = torch.baddbmm(self.masks[window], grouped, seen, alpha=self.scale)
        return torch.bmm(scores.softmax(dim=-1), values[:, : self.longest]).view(self.count, -1)
