"""Attention in plain torch, for any device and page size: the reference for tests of the other backends.

Decode rows are computed by one call, padded to the longest of them; prefill chunks one by one.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.norm import rms_norm
from mini_infer_engine.layers.rotary import Rotary, multipliers, rotate_
from mini_infer_engine.runtime.attention.eager import attention
from mini_infer_engine.runtime.attention.masks import additive, decode_masks
from mini_infer_engine.runtime.attention.running_copy import RunningCopy
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool


class Decodes(Protocol):
    """The decode rows of one pass."""

    def attend(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
        """Returns attention of the rows' tokens, the first of q, after their keys and values were written."""


class TorchAttention:
    """Runs torch's attention over gathered pages; fp32 decodes on a CPU use a `RunningCopy` instead."""

    def __init__(self, layers: Sequence[AttentionBlock], pool: KVPool) -> None:
        self.pool = pool
        self.windows = {layer.sliding_window for layer in layers}
        copies = pool.pages.device.type == "cpu" and pool.spec.dtype == torch.float32
        self.copy = RunningCopy(pool) if copies else None

    def prepare(self, inputs: PassInputs, logits_indices: Tensor | None) -> "TorchAttentionPass":
        """Returns the attention of one pass, with gather indices for all layers and a set of masks for each window."""
        return TorchAttentionPass(self, inputs, logits_indices)

    def decodes(self, inputs: PassInputs) -> Decodes | None:
        """Returns the attention of the decode rows, or None if the pass has none."""
        copied = None if self.copy is None else self.copy.follow(inputs, self.windows)
        if copied is None and inputs.num_decodes:
            return GatheredDecodes(self.pool, inputs, self.windows)
        return copied


class TorchAttentionPass:
    """The attention of one pass by `TorchAttention`, an `ops.base.AttentionPass`."""

    def __init__(self, backend: TorchAttention, inputs: PassInputs, logits_indices: Tensor | None) -> None:
        self.logits_indices = logits_indices
        self.pool, windows = backend.pool, backend.windows
        self.num_decodes = inputs.num_decodes
        rows_of_groups = [self.pool.token_rows_of(pages, inputs.write_offsets) for pages in inputs.write_pages]
        self.token_rows = self.pool.by_layer(rows_of_groups)
        self.decodes = backend.decodes(inputs)
        rows = range(inputs.num_decodes, len(inputs.counts))
        self.prefills = [_PrefillRow(self.pool, inputs, row, windows) for row in rows]
        self.positions = inputs.positions
        self._grid = None if inputs.images is None else inputs.images.positions
        self._rotations: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Normalises and rotates q and k, writes keys and values into the pool, and attends."""
        assert isinstance(layer, Attention), "this backend has keys and values"
        q, kv = self._rotated(qkv, layer)
        mixed = self.attend_rotated(q, kv, layer)
        if layer.is_last and self.logits_indices is not None:
            return mixed.index_select(0, self.logits_indices)
        return mixed

    def _rotated(self, qkv: Tensor, layer: Attention) -> tuple[Tensor, Tensor]:
        """Returns [tokens, heads, head_dim] and [tokens, 2, kv_heads, head_dim], views of qkv, which is changed in
        place.
        """
        heads = qkv.view(-1, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
        qk = heads[:, : layer.num_heads + layer.num_kv_heads]
        if layer.qk_norm_weight is not None and layer.q_norm is not None:
            rms_norm(qk, layer.qk_norm_weight, layer.q_norm.eps, out=qk)
        assert layer.rotary is not None, "finish_loading comes before the first pass"
        if layer.rope.type != "none":
            if layer.rotary not in self._rotations:
                self._rotations[layer.rotary] = self._multipliers(layer.rotary)
            rotate_(qk, *self._rotations[layer.rotary])
        kv = heads[:, layer.num_heads :]
        return heads[:, : layer.num_heads], kv.view(-1, 2, layer.num_kv_heads, layer.head_dim)

    def _multipliers(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        return rotary.lookup(self.positions) if self._grid is None else multipliers(rotary.by_section(self._grid))

    def attend_rotated(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
        """Writes the new keys and values into the pool, then attends. Returns [tokens, heads * head_dim]."""
        kv = self.pool.write(self.token_rows[layer.layer], kv)
        outputs: list[Tensor] = []
        if self.decodes is not None:
            outputs.append(self.decodes.attend(q, kv, layer))
        begin = self.num_decodes
        for prefill in self.prefills:
            end = begin + prefill.count
            outputs.append(prefill.attend(q[begin:end], kv[begin:end], layer))
            begin = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class GatheredDecodes:
    """All decode rows at once. The query heads that share a kv head stand where query positions usually do."""

    def __init__(self, pool: KVPool, inputs: PassInputs, windows: set[int | None]) -> None:
        self.pool = pool
        self.count = inputs.num_decodes
        self.longest = max(inputs.starts[: self.count]) + 1
        pages = -(-self.longest // pool.spec.page_size)
        tables = inputs.page_tables[:, : self.count, :pages]
        self.gather_rows = pool.by_layer([pool.gather_rows(table) for table in tables])
        masks = decode_masks(inputs, self.longest, windows, pool.spec.dtype)
        self.masks = {window: mask[:, None, None] for window, mask in masks.items()}  # [rows, 1, 1, longest]

    def attend(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
        """Computes attention of the first `count` tokens of q, [count, heads * head_dim]."""
        del kv  # they are in the pool
        keys, values = self.pool.gather(self.gather_rows[layer.layer], self.count)
        keys, values = keys[:, : self.longest].transpose(1, 2), values[:, : self.longest].transpose(1, 2)
        grouped = q[: self.count].reshape(self.count, keys.shape[1], -1, keys.shape[3])
        mask = self.masks[layer.sliding_window]
        return attention(grouped, keys, values, mask, layer).reshape(self.count, -1)


class _PrefillRow:
    """One chunk of one prompt."""

    def __init__(self, pool: KVPool, inputs: PassInputs, row: int, windows: set[int | None]) -> None:
        self.pool = pool
        self.start, self.count = inputs.starts[row], inputs.counts[row]
        self.end = self.start + self.count
        self.masks: dict[int | None, Tensor | None] = {}
        if self.start:
            pages = -(-self.end // pool.spec.page_size)
            tables = inputs.page_tables[:, row, :pages]
            self.gather_rows = pool.by_layer([pool.gather_rows(table) for table in tables])
        keys = torch.arange(self.end, device=inputs.ends.device)  # cache indexes, as in `decode_masks`
        queries = last_keys = keys[self.start :, None]
        is_causal = inputs.images is None or inputs.images.last_keys is None
        if inputs.images is not None and inputs.images.last_keys is not None:
            first = sum(inputs.counts[:row])
            last_keys = inputs.images.last_keys[first : first + self.count, None]
        for window in windows:
            if is_causal and self.start == 0 and (window is None or window >= self.end):
                self.masks[window] = None  # plainly causal
                continue
            visible = keys <= last_keys
            if window is not None:
                visible &= keys > queries - window
            self.masks[window] = additive(visible, pool.spec.dtype)  # [count, end]

    def attend(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
        k, v = kv.unbind(1)
        if self.start:
            keys, values = self.pool.gather(self.gather_rows[layer.layer], 1)
            k, v = keys[0, : self.end], values[0, : self.end]
        mask = self.masks[layer.sliding_window]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, head_dim]
        return attention(q, k, v, mask, layer).squeeze(0).transpose(0, 1).reshape(self.count, -1)
