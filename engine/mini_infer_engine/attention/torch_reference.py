"""Attention in plain torch, for any device and page size: the truth that the others are tested against.

Decode rows go through one call, padded to the longest of them; prefill chunks one by one.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.attention.masks import additive, decode_masks
from mini_infer_engine.attention.running_copy import CopiedDecodes, RunningCopy
from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.runtime.inputs import PassInputs
from mini_infer_engine.runtime.kv_pool import KVPool


class TorchAttention:
    """scaled_dot_product_attention over gathered pages; fp32 decodes on a CPU read a copy that follows them instead."""

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.config, self.pool = config, pool
        copies = pool.pages.device.type == "cpu" and pool.shape.dtype == torch.float32
        self.copy = RunningCopy(pool) if copies else None

    def prepare(self, inputs: PassInputs) -> "TorchAttentionPass":
        """Gather indices for all layers, and one set of masks for each window that the model uses."""
        return TorchAttentionPass(self.config, self.pool, inputs, self.copy)


class TorchAttentionPass:
    """See `TorchAttention`."""

    def __init__(self, config: ModelConfig, pool: KVPool, inputs: PassInputs, copy: RunningCopy | None) -> None:
        self.windows, windows = config.sliding_windows, set(config.sliding_windows)
        self.pool = pool
        self.num_decodes = inputs.num_decodes
        self.token_rows = pool.token_rows_of(inputs.write_pages, inputs.write_offsets)
        copied = copy.follow(inputs, windows) if copy is not None else None
        self.decodes: CopiedDecodes | _GatheredDecodes | None = copied
        if inputs.num_decodes and copied is None:
            self.decodes = _GatheredDecodes(pool, inputs, windows)
        rows = range(inputs.num_decodes, len(inputs.counts))
        self.prefills = [_PrefillRow(pool, inputs, row, windows) for row in rows]

    def attend(self, q: Tensor, kv: Tensor, layer: int) -> Tensor:
        """See `AttentionPass.attend`."""
        kv = kv.contiguous()
        self.pool.tokens.index_copy_(0, self.token_rows[layer], kv.view(-1, self.pool.shape.row_width))
        window = self.windows[layer]
        outputs: list[Tensor] = []
        if self.decodes is not None:
            outputs.append(self.decodes.attend(q, kv, layer, window))
        begin = self.num_decodes
        for prefill in self.prefills:
            end = begin + prefill.count
            outputs.append(prefill.attend(q[begin:end], kv[begin:end], layer, window))
            begin = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _GatheredDecodes:
    """All decode rows at once. The query heads that share a kv head stand where query positions usually do."""

    def __init__(self, pool: KVPool, inputs: PassInputs, windows: set[int | None]) -> None:
        self.pool = pool
        self.count = inputs.num_decodes
        self.longest = max(inputs.starts[: self.count]) + 1
        pages = -(-self.longest // pool.shape.page_size)
        self.gather_rows = pool.gather_rows(inputs.page_tables[: self.count, :pages])
        masks = decode_masks(inputs, self.longest, windows, pool.shape.dtype)
        self.masks = {window: mask[:, None, None] for window, mask in masks.items()}  # [rows, 1, 1, longest]

    def attend(self, q: Tensor, _kv: Tensor, layer: int, window: int | None) -> Tensor:
        keys, values = self.pool.gather(self.gather_rows[layer], self.count)
        keys, values = keys[:, : self.longest].transpose(1, 2), values[:, : self.longest].transpose(1, 2)
        grouped = q[: self.count].reshape(self.count, keys.shape[1], -1, keys.shape[3])
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.masks[window])
        return out.reshape(self.count, -1)


class _PrefillRow:
    """One chunk of one prompt."""

    def __init__(self, pool: KVPool, inputs: PassInputs, row: int, windows: set[int | None]) -> None:
        self.pool = pool
        self.start, self.count = inputs.starts[row], inputs.counts[row]
        self.end = self.start + self.count
        self.masks: dict[int | None, Tensor | None] = {}
        if self.start:
            pages = -(-self.end // pool.shape.page_size)
            self.gather_rows = pool.gather_rows(inputs.page_tables[row, :pages])
        key_positions = torch.arange(self.end, device=inputs.ends.device)
        query_positions = key_positions[self.start :, None]
        for window in windows:
            if self.start == 0 and (window is None or window >= self.end):
                self.masks[window] = None  # plainly causal
                continue
            visible = key_positions <= query_positions
            if window is not None:
                visible &= key_positions > query_positions - window
            self.masks[window] = additive(visible, pool.shape.dtype)  # [count, end]

    def attend(self, q: Tensor, kv: Tensor, layer: int, window: int | None) -> Tensor:
        k, v = kv.unbind(1)
        if self.start:
            keys, values = self.pool.gather(self.gather_rows[layer], 1)
            k, v = keys[0, : self.end], values[0, : self.end]
        mask = self.masks[window]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, head_dim]
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.squeeze(0).transpose(0, 1).reshape(self.count, -1)
