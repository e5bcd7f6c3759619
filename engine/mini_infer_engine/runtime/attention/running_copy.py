"""Keeps keys and values of the decoding sequences side by side from pass to pass, for decode attention in fp32 on a
CPU.

Gathering a batch's pages in every layer of every pass costs a CPU as much as attending to them. All sequences end in
the same column, however long they are: a pass adds one column, and the mask stays the same from pass to pass. The copy
is a cache: the pool has every token too. The copy is gathered anew whenever the decode rows are not those of the last
pass, one token later.
"""

import math

import torch
from torch import Tensor

from mini_infer_engine.layers.attention import Attention
from mini_infer_engine.runtime.attention.eager import capped_scores, softmax_with_sinks
from mini_infer_engine.runtime.attention.masks import additive
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.zero_memory import zeros

MOST_BYTES = 512 * 1024**2
"""Largest copy: larger batches are gathered a layer at a time."""

_SPARE_TOKENS = 64
"""Approximate space after the newest column: the copy is made anew each time it is used up."""


class RunningCopy:
    """The copy, and the decode rows for which it was made."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.slots: list[int] = []
        self.next_starts: list[int] = []
        self.column = 0  # of this pass's tokens
        self.capacity = 0
        self.storage = torch.empty(0, dtype=pool.spec.dtype, device=pool.pages.device)
        # What a product of few queries sums over comes last but one, or it would jump from key to key in memory.
        self.keys = self.storage  # [layers, rows, kv_heads, head_dim, capacity]
        self.values = self.storage  # [layers, rows, kv_heads, capacity, head_dim]
        self.mask = self.storage  # [rows * kv_heads, 1, capacity] hides what stands before a sequence

    def follow(self, inputs: PassInputs, windows: set[int | None]) -> "CopiedDecodes | None":
        """Updates the copy for this pass's decode rows. Returns None if there are none, or if they are too large for
        it.

        A row whose token only the device knows continues the sequence that sampled it in this slot, so that slot and
        cache index identify it. Any other row may belong to a new sequence in an old slot.
        """
        decodes = inputs.num_decodes
        slots, starts = inputs.slots[:decodes], inputs.starts[:decodes]
        if not inputs.changed_slots.isdisjoint(self.slots):
            self.slots = []
        if not decodes:
            return None
        self.column += 1
        is_next = slots == self.slots and starts == self.next_starts and self.column < self.capacity
        if not is_next and not self._gather(inputs, starts):
            self.slots = []
            return None
        self.slots, self.next_starts = slots, [start + 1 for start in starts]
        return CopiedDecodes(self, decodes, windows)

    def forget(self) -> None:
        """Makes the next pass gather anew: the one before it did without the copy."""
        self.slots = []

    def _gather(self, inputs: PassInputs, starts: list[int]) -> bool:
        longest = max(starts)
        # An odd number of cache lines: the rows of keys would fall into few sets of the cache if it were a power of 2.
        capacity = (longest + _SPARE_TOKENS) // 32 * 32 + 16
        if not self._reserve(len(starts), capacity):
            return False
        padding = longest - torch.tensor(starts).unsqueeze(1)
        mask = additive(torch.arange(capacity) >= padding, self.storage.dtype)
        self.mask = mask.repeat_interleave(self.pool.spec.num_kv_heads, 0).unsqueeze(1)
        cache_indexes = (torch.arange(longest) - padding).clamp_(min=0)  # what is hidden must be finite, no more
        self._fill(inputs.page_tables[:, : len(starts)], cache_indexes)
        self.column = longest
        return True

    def _reserve(self, num_rows: int, capacity: int) -> bool:
        spec = self.pool.spec
        runs = (len(self.pool.places), num_rows, spec.num_kv_heads)
        num_elements = 2 * math.prod(runs) * capacity * spec.head_dim
        if num_elements * spec.dtype.itemsize > MOST_BYTES:
            return False
        if len(self.storage) < num_elements:
            self.storage = zeros((num_elements * 5 // 4,), spec.dtype, self.storage.device)
        keys, values = self.storage[:num_elements].chunk(2)
        self.keys = keys.view(*runs, spec.head_dim, capacity)
        self.values = values.view(*runs, capacity, spec.head_dim)
        self.capacity = capacity
        return True

    def _fill(self, page_tables: Tensor, cache_indexes: Tensor) -> None:
        """Fills the first columns of each row with its tokens of `cache_indexes` [rows, columns].

        `page_tables` [KV groups, rows, pages] are those of each KV group.
        """
        spec, (num_rows, columns) = self.pool.spec, cache_indexes.shape
        offsets = (cache_indexes % spec.page_size).flatten()
        pages = [table.gather(1, cache_indexes // spec.page_size).flatten() for table in page_tables]
        token_rows = self.pool.by_layer([self.pool.token_rows_of(of_group, offsets) for of_group in pages])
        scratch = self.storage.new_empty(2 * cache_indexes.numel(), spec.row_width)
        for rows, keys, values in zip(token_rows, self.keys, self.values, strict=True):
            tokens = self.pool.read(rows, scratch).view(num_rows, columns, 2, spec.num_kv_heads, spec.head_dim)
            keys[..., :columns].copy_(tokens[:, :, 0].permute(0, 2, 3, 1))
            values[:, :, :columns].copy_(tokens[:, :, 1].transpose(1, 2))


class CopiedDecodes:
    """The decode rows of one pass, which must attend before the next one begins."""

    def __init__(self, copy: RunningCopy, count: int, windows: set[int | None]) -> None:
        self.count = count
        self.new_keys = copy.keys.select(-1, copy.column).unbind(0)  # of each layer, [count, kv_heads, head_dim]
        self.new_values = copy.values.select(-2, copy.column).unbind(0)
        keys, values, end = copy.keys.flatten(1, 2), copy.values.flatten(1, 2), copy.column + 1
        # Mask, keys of each layer, values of each layer: the columns in the window.
        self.seen: dict[int | None, tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        for window in windows:
            columns = slice(0 if window is None else max(0, end - window), end)
            self.seen[window] = copy.mask[..., columns], keys[..., columns].unbind(0), values[:, :, columns].unbind(0)

    def attend(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
        """Computes attention of the first `count` tokens of q, [count, heads * head_dim]; matrix products beat SDPA's
        kernel.
        """
        keys, values = kv[: self.count].unbind(1)
        self.new_keys[layer.layer].copy_(keys)
        self.new_values[layer.layer].copy_(values)
        mask, seen_keys, seen_values = self.seen[layer.sliding_window]
        grouped = q[: self.count].reshape(len(mask), -1, q.shape[-1])
        if layer.softcap is None:
            scores = torch.baddbmm(mask, grouped, seen_keys[layer.layer], alpha=layer.scale)
        else:
            scores = capped_scores(torch.bmm(grouped, seen_keys[layer.layer]), layer).add_(mask)
        sinks = layer.sinks
        if sinks is not None:
            sinks = sinks.view(layer.num_kv_heads, -1, 1).repeat(self.count, 1, 1)
        weights = softmax_with_sinks(scores, sinks)
        return torch.bmm(weights, seen_values[layer.layer]).view(self.count, -1)
