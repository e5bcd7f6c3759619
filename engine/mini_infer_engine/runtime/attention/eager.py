"""Attention that torch's own cannot compute: soft-capped scores (Gemma 2, arXiv 2408.00118) and attention sinks."""

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.layers.attention import AttentionBlock


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: AttentionBlock) -> Tensor:
    """Attends as a layer does: softmax(q k^T * scale + mask) v, with its soft cap and sinks if it has some.

    q is [..., heads, queries, head_dim]; k and v are [..., kv_heads, keys, head_dim], where kv_heads divides heads. The
    mask is additive; None means causal, with as many keys as queries. Sinks are those of the queries' dimension
    `heads`, or of `queries` if these are the heads of a group.
    """
    if layer.softcap is None and layer.sinks is None:
        is_causal, enable_gqa = mask is None, q.shape[-3] != k.shape[-3]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=layer.scale, enable_gqa=enable_gqa
        )
    if (group := q.shape[-3] // k.shape[-3]) > 1:
        k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    scores = capped_scores(q @ k.transpose(-1, -2), layer)
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(hidden, float("-inf"))
    else:
        scores = scores + mask
    sinks = None if layer.sinks is None else layer.sinks.view(q.shape[-3], -1, 1)
    return softmax_with_sinks(scores, sinks).to(q.dtype) @ v


def capped_scores(products: Tensor, layer: AttentionBlock) -> Tensor:
    """Scales products of queries and keys in place, and caps them if the layer does."""
    if layer.softcap is None:
        return products.mul_(layer.scale)
    return products.mul_(layer.scale / layer.softcap).tanh_().mul_(layer.softcap)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax over the last dimension in fp32, with a sink beside the scores that takes its share.

    `sinks` broadcasts to the scores, with 1 as its last dimension.
    """
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
