"""Attention in plain torch whose decodes select pages: the reference for `triton_selection`.

Passes whose contexts are all within the budget are those of `TorchAttention`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.runtime.attention.eager import attention
from mini_infer_engine.runtime.attention.masks import additive
from mini_infer_engine.runtime.attention.page_scores import key_bounds, page_scores, select_pages, selected_lengths
from mini_infer_engine.runtime.attention.torch_reference import (
    Decodes,
    GatheredDecodes,
    TorchAttention,
    TorchAttentionPass,
)
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool


class SelectingTorchAttention(TorchAttention):
    """A `TorchAttention` over a pool with the bounds of its keys."""

    def __init__(self, layers: Sequence[AttentionBlock], pool: KVPool, bounds: KeyBounds) -> None:
        super().__init__(layers, pool)
        self.bounds = bounds

    def prepare(self, inputs: PassInputs, logits_indices: Tensor | None) -> "SelectingTorchPass":
        """Returns the attention of one pass."""
        return SelectingTorchPass(self, inputs, logits_indices)

    def decodes(self, inputs: PassInputs) -> Decodes | None:
        """Returns the attention of the decode rows, which selects pages if there are more than the budget."""
        most_tokens = self.bounds.budget_pages * self.pool.spec.page_size
        if max(inputs.starts[: inputs.num_decodes], default=0) < most_tokens:
            return super().decodes(inputs)
        if self.copy is not None:
            self.copy.forget()
        return _SelectedDecodes(self.pool, self.bounds, inputs, GatheredDecodes(self.pool, inputs, self.windows))


class SelectingTorchPass(TorchAttentionPass):
    """The attention of one pass, which makes the bounds of the pages that it completes."""

    def __init__(self, backend: SelectingTorchAttention, inputs: PassInputs, logits_indices: Tensor | None) -> None:
        super().__init__(backend, inputs, logits_indices)
        self._bounds = backend.bounds
        is_complete = inputs.write_offsets == self.pool.spec.page_size - 1
        self._completed = inputs.write_pages[0][is_complete]

    def attend_rotated(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
        """Writes the new keys and values into the pool, attends, and bounds the keys of complete pages."""
        mixed = super().attend_rotated(q, kv, layer)
        bounds = self._bounds.of_layer(layer.layer)
        if bounds is not None and self._completed.shape[0]:
            bounds[self._completed] = key_bounds(self.pool.pages[self._completed, layer.layer, 0])
        return mixed


class _SelectedDecodes:
    """All decode rows at once, of which each KV head reads pages of its own, equally many."""

    def __init__(self, pool: KVPool, bounds: KeyBounds, inputs: PassInputs, dense: GatheredDecodes) -> None:
        self.pool, self.bounds, self.dense = pool, bounds, dense
        self.count, page_size, budget = inputs.num_decodes, pool.spec.page_size, bounds.budget_pages
        kv_lengths = inputs.kv_lengths[: self.count]
        self.complete = kv_lengths // page_size
        self.tables = inputs.page_tables[0, : self.count]
        tokens = torch.arange(budget * page_size, device=kv_lengths.device)
        seen = tokens <= selected_lengths(kv_lengths, budget, page_size)[:, None]
        self.mask = additive(seen, pool.spec.dtype)[:, None, None]  # [rows, 1, 1, tokens]
        self.heads = torch.arange(pool.spec.num_kv_heads, device=kv_lengths.device)[:, None]

    def attend(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
        """Computes attention of the first `count` tokens of q, [count, heads * head_dim]."""
        bounds = self.bounds.of_layer(layer.layer)
        if bounds is None:
            return self.dense.attend(q, kv, layer)
        grouped = q[: self.count].reshape(self.count, layer.num_kv_heads, -1, layer.head_dim)
        scores = page_scores(grouped, bounds[self.tables])
        places = select_pages(scores, self.complete, self.bounds.budget_pages)
        pages = self.tables[:, None].expand(-1, layer.num_kv_heads, -1).gather(2, places)
        # [rows, kv_heads, pages, page_size, head_dim] each
        keys, values = (self.pool.pages[pages, layer.layer, half, :, self.heads].flatten(2, 3) for half in (0, 1))
        return attention(grouped, keys, values, self.mask, layer).reshape(self.count, -1)
