"""Latent attention in plain torch, for any device and page size: the reference for tests of our kernels.

Prompt chunks are decompressed: keys and values of all heads are computed from the latents of the whole sequence. Decode
rows are absorbed: queries are projected to the latents.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.latent_attention import LatentAttention
from mini_infer_engine.layers.norm import rms_norm
from mini_infer_engine.layers.rotary import Rotary, rotate_pairs_
from mini_infer_engine.runtime.attention.masks import additive, decode_masks
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool


class TorchLatentAttention:
    """The backend in plain torch for layers with latent attention."""

    def __init__(self, layers: Sequence[LatentAttention], pool: KVPool) -> None:
        assert pool.spec.row_width == layers[0].spec.latent_width, "the pool is of another model"
        self.pool = pool

    def prepare(self, inputs: PassInputs, logits_indices: Tensor | None) -> "TorchLatentPass":
        """Returns the attention of one pass, with the addresses and masks that all layers share."""
        return TorchLatentPass(self.pool, inputs, logits_indices)


class TorchLatentPass:
    """The latent attention of one pass, an `ops.base.AttentionPass`."""

    def __init__(self, pool: KVPool, inputs: PassInputs, logits_indices: Tensor | None) -> None:
        self.logits_indices = logits_indices
        self.pool, self.positions = pool, inputs.positions
        self.token_rows = pool.token_rows_of(inputs.write_pages[0], inputs.write_offsets)
        self.decodes = _Decodes(pool, inputs) if inputs.num_decodes else None
        self.num_decodes = inputs.num_decodes
        self.prefills = [_Prefill(pool, inputs, row) for row in range(inputs.num_decodes, len(inputs.counts))]
        self._rotations: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Rotates queries, writes latents into the pool, attends: decode rows together, prompt chunks one by one."""
        assert isinstance(layer, LatentAttention), "this backend has latents"
        q, latents = rotated_latents(qkv, layer, self.positions, self._rotations)
        self.pool.tokens.index_copy_(0, self.token_rows[layer.layer], latents.contiguous())
        outputs: list[Tensor] = []
        if self.decodes is not None:
            outputs.append(self.decodes.attend(q[: self.num_decodes], layer))
        begin = self.num_decodes
        for prefill in self.prefills:
            end = begin + prefill.count
            outputs.append(prefill.attend(q[begin:end], latents[begin:end], layer))
            begin = end
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if layer.is_last and self.logits_indices is not None:
            return mixed.index_select(0, self.logits_indices)
        return mixed


def rotated_latents(
    packed: Tensor, layer: LatentAttention, positions: Tensor, rotations: dict[Rotary, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Returns queries [tokens, heads, qk_dim] and latents [tokens, latent_width], views of packed, which is changed in
    place.

    `rotations` keeps the pass's rows of each table.
    """
    spec, norm = layer.spec, layer.kv_a_layernorm
    latents = packed[:, layer.q_width : layer.q_width + spec.latent_width]
    q = packed[:, : layer.q_width].view(len(packed), layer.num_heads, spec.qk_dim)
    rms_norm(latents[:, : spec.kv_rank], norm.weight, norm.eps, out=latents[:, : spec.kv_rank])
    assert layer.rotary is not None, "finish_loading comes before the first pass"
    if layer.rotary not in rotations:
        rotations[layer.rotary] = layer.rotary.lookup(positions)
    for rotated in (q[..., spec.nope_dim :], latents[:, None, spec.kv_rank :]):
        rotate_pairs_(rotated, rotations[layer.rotary], interleaved=spec.interleaved)
    return q, latents


class _Decodes:
    """All decode rows at once."""

    def __init__(self, pool: KVPool, inputs: PassInputs) -> None:
        self.pool, self.count = pool, inputs.num_decodes
        self.longest = max(inputs.starts[: self.count]) + 1
        pages = -(-self.longest // pool.spec.page_size)
        self.gather_rows = pool.gather_rows(inputs.page_tables[0, : self.count, :pages])
        self.mask = decode_masks(inputs, self.longest, {None}, pool.spec.dtype)[None].unsqueeze(1)  # [rows, 1, longest]

    def attend(self, q: Tensor, layer: LatentAttention) -> Tensor:
        spec = layer.spec
        latents = self.pool.gather_latents(self.gather_rows[layer.layer], self.count)[:, : self.longest]
        absorbed = torch.einsum("thd,hdr->thr", q[..., : spec.nope_dim], layer.key_up)
        queries = torch.cat((absorbed, q[..., spec.nope_dim :]), dim=-1)
        scores = torch.baddbmm(self.mask, queries, latents.mT, alpha=layer.scale)
        mixed = torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype), latents[..., : spec.kv_rank])
        return torch.einsum("thr,hvr->thv", mixed, layer.value_up).flatten(1)


class _Prefill:
    """One chunk of one prompt."""

    def __init__(self, pool: KVPool, inputs: PassInputs, row: int) -> None:
        self.pool = pool
        self.start, self.count = inputs.starts[row], inputs.counts[row]
        self.end = self.start + self.count
        self.mask: Tensor | None = None  # plainly causal
        if self.start:
            pages = -(-self.end // pool.spec.page_size)
            self.gather_rows = pool.gather_rows(inputs.page_tables[0, row, :pages])
            places = torch.arange(self.end, device=inputs.ends.device)
            self.mask = additive(places <= places[self.start :, None], pool.spec.dtype)  # [count, end]

    def attend(self, q: Tensor, latents: Tensor, layer: LatentAttention) -> Tensor:
        spec = layer.spec
        if self.start:
            latents = self.pool.gather_latents(self.gather_rows[layer.layer], 1)[0, : self.end]
        kv = layer.kv_b_proj(latents[:, : spec.kv_rank].contiguous())
        kv = kv.view(-1, layer.num_heads, spec.nope_dim + spec.value_dim)
        shared = latents[:, None, spec.kv_rank :].expand(-1, layer.num_heads, -1)
        k, v = torch.cat((kv[..., : spec.nope_dim], shared), dim=-1), kv[..., spec.nope_dim :]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, dim]
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.mask is None, scale=layer.scale
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)
