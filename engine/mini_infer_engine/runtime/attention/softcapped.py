"""Attention whose scores are soft-capped (Gemma 2, arXiv 2408.00118), which torch's own attention cannot compute."""

import torch
from torch import Tensor


def softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float
) -> Tensor:
    """Returns softmax(softcap * tanh(q k^T * scale / softcap) + mask) v, with the softmax in fp32.

    q is [..., heads, queries, head_dim]; k and v are [..., kv_heads, keys, head_dim], where kv_heads divides heads. The
    mask is additive; None means causal, with as many keys as queries.
    """
    if (group := q.shape[-3] // k.shape[-3]) > 1:
        k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(hidden, float("-inf"))
    else:
        scores = scores + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v
