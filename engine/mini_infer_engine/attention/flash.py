"""flash-attn 2.8 on GPU: paged decode and varlen prefill (Dao 2023, arXiv 2307.08691). Pages of 256 tokens."""

from typing import Any, ClassVar

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from mini_infer_engine.attention.base import AttentionBackend
from mini_infer_engine.inputs import PassInputs
from mini_infer_engine.kv_pool import KVPool
from mini_infer_engine.models.config import ModelConfig


class FlashAttention(AttentionBackend):
    """Decode rows in one split-KV call, prefill chunks in one varlen call, both reading pages in place."""

    page_size_step: ClassVar[int] = 256

    def prepare(self, inputs: PassInputs) -> "FlashAttentionPass":
        """Only integer columns: the kernels mask by length."""
        return FlashAttentionPass(self.config, self.pool, inputs)


class FlashAttentionPass:
    """See `FlashAttention`."""

    def __init__(self, config: ModelConfig, pool: KVPool, inputs: PassInputs) -> None:
        self.windows = config.sliding_windows
        self.pool = pool
        self.write_rows = pool.write_rows(inputs.write_pages, inputs.write_offsets)
        self.num_decodes = decodes = inputs.num_decodes
        self.page_tables = inputs.page_tables.to(torch.int32)
        self.decode_lengths = inputs.ends[:decodes].to(torch.int32)
        self.has_prefills = len(inputs.counts) > decodes
        if self.has_prefills:
            counts, starts = inputs.counts[decodes:], inputs.starts[decodes:]
            ends = inputs.ends[decodes:]
            self.query_starts = (inputs.query_starts[decodes:] - decodes).to(torch.int32)
            self.key_starts = torch.nn.functional.pad(ends.cumsum(0), (1, 0)).to(torch.int32)
            self.longest_query = max(counts)
            self.longest_key = max(start + count for start, count in zip(starts, counts, strict=True))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See `AttentionPass.attend`."""
        rows = self.pool.token_rows
        rows.index_copy_(0, self.write_rows[2 * layer], k.flatten(1))
        rows.index_copy_(0, self.write_rows[2 * layer + 1], v.flatten(1))
        keys, values = self.pool.pages[:, layer].unbind(1)  # [pages, page_size, kv_heads, head_dim], strided
        window = self.windows[layer]
        common: dict[str, Any] = {"causal": True, "window_size": (-1 if window is None else window - 1, 0)}
        split = self.num_decodes
        outputs: list[Tensor] = []
        if split:
            out = flash_attn_with_kvcache(
                q[:split].unsqueeze(1),
                keys,
                values,
                cache_seqlens=self.decode_lengths,
                block_table=self.page_tables[:split],
                **common,
            )
            outputs.append(out.reshape(split, -1))
        if self.has_prefills:
            out = flash_attn_varlen_func(
                q[split:],
                keys,
                values,
                cu_seqlens_q=self.query_starts,
                cu_seqlens_k=self.key_starts,
                max_seqlen_q=self.longest_query,
                max_seqlen_k=self.longest_key,
                block_table=self.page_tables[split:],
                **common,
            )
            outputs.append(out.flatten(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
