"""Sparse latent attention in plain torch, for any device: an indexer scores all tokens, and a token reads the best.

Decode rows gather the latents of the chosen tokens. Prompt chunks mask all others, some queries at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.rotary import Rotary, rotate_pairs_
from mini_infer_engine.layers.sparse_latent_attention import SparseLatentAttention
from mini_infer_engine.runtime.attention.masks import additive, decode_masks
from mini_infer_engine.runtime.attention.torch_latent import rotated_latents
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool

_MOST_SCORES = 1 << 26
"""Scores of the indexer's heads that are computed at a time, in fp32."""


class TorchSparseLatentAttention:
    """The backend in plain torch for layers with sparse latent attention."""

    def __init__(self, layers: Sequence[SparseLatentAttention], pool: KVPool) -> None:
        width = layers[0].spec.latent_width + layers[0].index.head_dim
        assert pool.spec.row_width == width, "the pool is of another model"
        self.pool, self.top_k = pool, layers[0].index.top_k

    def prepare(self, inputs: PassInputs, logits_indices: Tensor | None) -> "TorchSparseLatentPass":
        """Returns the attention of one pass."""
        return TorchSparseLatentPass(self.pool, inputs, logits_indices, self.top_k)


class TorchSparseLatentPass:
    """The attention of one pass, an `ops.base.AttentionPass`.

    The parts of the pass keep what the last layer with an indexer has chosen, for the layers without one.
    """

    def __init__(self, pool: KVPool, inputs: PassInputs, logits_indices: Tensor | None, top_k: int) -> None:
        self.logits_indices, self.positions = logits_indices, inputs.positions
        self.pool = pool
        self.token_rows = pool.token_rows_of(inputs.write_pages[0], inputs.write_offsets)
        rows = range(inputs.num_decodes, len(inputs.counts))
        self.parts: list[_Decodes | _Prefill] = [_Decodes(pool, inputs, top_k)] if inputs.num_decodes else []
        self.parts += [_Prefill(pool, inputs, row, top_k) for row in rows]
        self._rotations: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def attend(self, packed: Tensor, layer: AttentionBlock) -> Tensor:
        """Rotates queries and keys, writes latents with the indexer's keys into the pool, chooses, and attends."""
        assert isinstance(layer, SparseLatentAttention), "this backend has latents of sparse attention"
        q, latents = rotated_latents(packed, layer, self.positions, self._rotations)
        index, entries = self._index_input(packed, layer, latents)
        self.pool.tokens.index_copy_(0, self.token_rows[layer.layer], entries.contiguous())
        outputs, begin = [], 0
        for part in self.parts:
            rows = slice(begin, begin + part.count)
            outputs.append(part.attend(q[rows], entries[rows], None if index is None else index.of(rows), layer))
            begin = rows.stop
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if layer.is_last and self.logits_indices is not None:
            return mixed.index_select(0, self.logits_indices)
        return mixed

    def _index_input(
        self, packed: Tensor, layer: SparseLatentAttention, latents: Tensor
    ) -> "tuple[_IndexQueries | None, Tensor]":
        """Returns the indexer's queries, or None without an indexer, and the cache entries [tokens, row_width]."""
        spec, index = layer.spec, layer.index
        if layer.indexer is None:
            return None, functional.pad(latents, (0, index.head_dim))
        assert layer.rotary is not None
        begin = layer.q_width + spec.latent_width
        end = begin + index.head_dim
        keys = packed[:, begin:end].unsqueeze(1)
        queries = packed[:, end : end + index.query_width].view(len(packed), index.num_heads, index.head_dim)
        for rotated in (keys[..., : spec.rope_dim], queries[..., : spec.rope_dim]):
            rotate_pairs_(rotated, self._rotations[layer.rotary], interleaved=index.interleaved)
        weights = packed[:, end + index.query_width :].contiguous().view(torch.float32)
        return _IndexQueries(queries, weights * index.score_scale), packed[:, layer.q_width : end]


@dataclass(frozen=True, slots=True)
class _IndexQueries:
    """The indexer's queries of some tokens."""

    queries: Tensor  # [tokens, heads, head_dim]
    weights: Tensor  # [tokens, heads] fp32, times the scale of scores

    def of(self, rows: slice) -> "_IndexQueries":
        """Returns those of these rows."""
        return _IndexQueries(self.queries[rows], self.weights[rows])

    def scores(self, keys: Tensor) -> Tensor:
        """Returns the score [tokens, keys] fp32 of each token's keys, [keys, head_dim] or [tokens, keys, head_dim]."""
        products = self.queries.float() @ keys.float().transpose(-1, -2)  # [tokens, heads, keys]
        return (self.weights.unsqueeze(1) @ products.relu_()).squeeze(1)


class _Decodes:
    """All decode rows at once."""

    def __init__(self, pool: KVPool, inputs: PassInputs, top_k: int) -> None:
        self.pool, self.count, self.top_k = pool, inputs.num_decodes, top_k
        self.longest = max(inputs.starts[: self.count]) + 1
        pages = -(-self.longest // pool.spec.page_size)
        self.gather_rows = pool.gather_rows(inputs.page_tables[0, : self.count, :pages])
        self.mask = decode_masks(inputs, self.longest, {None}, torch.float32)[None]  # [rows, longest]
        self.chosen: Tensor | None = None  # [rows, top_k], of rows that are longer

    def attend(self, q: Tensor, _entries: Tensor, index: _IndexQueries | None, layer: SparseLatentAttention) -> Tensor:
        spec = layer.spec
        entries = self.pool.gather_latents(self.gather_rows[layer.layer], self.count)[:, : self.longest]
        latents, mask = entries[..., : spec.latent_width], self.mask
        if self.longest > self.top_k:
            if index is not None:
                scores = index.scores(entries[..., spec.latent_width :]) + self.mask
                self.chosen = scores.topk(self.top_k, dim=-1).indices
            assert self.chosen is not None, "the first layer has an indexer"
            latents = latents.gather(1, self.chosen.unsqueeze(-1).expand(-1, -1, spec.latent_width))
            mask = mask.gather(1, self.chosen)
        absorbed = torch.einsum("thd,hdr->thr", q[..., : spec.nope_dim], layer.key_up)
        queries = torch.cat((absorbed, q[..., spec.nope_dim :]), dim=-1)
        scores = torch.baddbmm(mask.unsqueeze(1).to(q.dtype), queries, latents.mT, alpha=layer.scale)
        mixed = torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype), latents[..., : spec.kv_rank])
        return torch.einsum("thr,hvr->thv", mixed, layer.value_up).flatten(1)


class _Prefill:
    """One chunk of one prompt."""

    def __init__(self, pool: KVPool, inputs: PassInputs, row: int, top_k: int) -> None:
        self.pool, self.top_k = pool, top_k
        self.start, self.count = inputs.starts[row], inputs.counts[row]
        self.end = self.start + self.count
        self.places = torch.arange(self.end, device=inputs.ends.device)
        if self.start:
            pages = -(-self.end // pool.spec.page_size)
            self.gather_rows = pool.gather_rows(inputs.page_tables[0, row, :pages])
        self.chosen: list[Tensor] = []
        """The tokens that each block of queries reads, [queries, top_k]."""

    def attend(self, q: Tensor, entries: Tensor, index: _IndexQueries | None, layer: SparseLatentAttention) -> Tensor:
        spec = layer.spec
        if self.start:
            entries = self.pool.gather_latents(self.gather_rows[layer.layer], 1)[0, : self.end]
        kv = layer.kv_b_proj(entries[:, : spec.kv_rank].contiguous())
        kv = kv.view(-1, layer.num_heads, spec.nope_dim + spec.value_dim)
        shared = entries[:, None, spec.kv_rank : spec.latent_width].expand(-1, layer.num_heads, -1)
        k = torch.cat((kv[..., : spec.nope_dim], shared), dim=-1).transpose(0, 1).unsqueeze(0)
        v = kv[..., spec.nope_dim :].transpose(0, 1).unsqueeze(0)
        if index is not None:
            self.chosen = []
        outputs = []
        for number, block in enumerate(self._blocks(layer)):
            visible = self.places <= self.places[self.start :][block, None]
            if self.end > self.top_k:
                if index is not None:
                    self.chosen.append(self._choose(index.of(block), entries[:, spec.latent_width :], visible))
                visible &= torch.zeros_like(visible).scatter_(1, self.chosen[number], value=True)
            queries = q[block].transpose(0, 1).unsqueeze(0)  # [1, heads, queries, qk_dim]
            mask = additive(visible, q.dtype)
            out = functional.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=layer.scale)
            outputs.append(out.squeeze(0).transpose(0, 1).flatten(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _blocks(self, layer: SparseLatentAttention) -> list[slice]:
        """Returns the queries that are computed together."""
        most = max(1, _MOST_SCORES // (self.end * max(layer.index.num_heads, layer.num_heads)))
        return [slice(begin, min(begin + most, self.count)) for begin in range(0, self.count, most)]

    def _choose(self, index: _IndexQueries, keys: Tensor, visible: Tensor) -> Tensor:
        scores = index.scores(keys).masked_fill_(~visible, float("-inf"))
        return scores.topk(self.top_k, dim=-1).indices
