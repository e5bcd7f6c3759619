"""Scores cached tokens of one layer by the attention that they get, and chooses those that a policy keeps.

The scores are those of NVIDIA's kvpress: of its SnapKVPress (Li et al. 2024, arXiv 2404.14469) and its
StreamingLLMPress (Xiao et al. 2023, arXiv 2309.17453). Pure functions of tensors; nothing here knows pages.
"""

import torch
from torch import Tensor
from torch.nn import functional

SNAPKV_KERNEL = 5
"""Tokens over which SnapKV averages attention, so that it keeps neighbours of what is attended to."""

_MOST_SCRATCH_BYTES = 256 << 20
_BYTES_PER_WEIGHT = 12
"""Bytes of an attention weight while it is computed: logits, their softmax in fp32, and a copy."""


def snapkv_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns the scores [kv_heads, keys - queries] fp32 of all keys but the last, which are those of the queries.

    q [queries, heads, head_dim] are the rotated queries of the last tokens, k [keys, kv_heads, head_dim] the keys of
    all. A score is the attention that the queries of the KV head's group pay to the key and its neighbours, on average.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, kv_heads, _ = k.shape
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # [kv_heads, group * queries, head_dim]
    keys = k.permute(1, 2, 0)
    num_before = num_keys - num_queries
    later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).triu_(1)
    later = later.repeat(num_heads // kv_heads, 1)
    step = max(1, _MOST_SCRATCH_BYTES // (grouped.shape[1] * num_keys * _BYTES_PER_WEIGHT))
    parts = []
    for begin in range(0, kv_heads, step):
        logits = torch.bmm(grouped[begin : begin + step], keys[begin : begin + step]).mul_(scale)
        logits[..., num_before:].masked_fill_(later, float("-inf"))
        weights = logits.softmax(dim=-1, dtype=torch.float32)[..., :num_before]
        parts.append(weights.mean(dim=1))
    # The mean over queries and heads of a group, and that over neighbours, are in either order the same.
    return functional.avg_pool1d(torch.cat(parts), SNAPKV_KERNEL, stride=1, padding=SNAPKV_KERNEL // 2)


def snapkv_kept(scores: Tensor, num_keys: int, num_kept: int) -> Tensor:
    """Returns the cache indexes that SnapKV keeps, [..., num_kept] int64, ascending: the tokens with the highest scores
    [..., tokens before the last], and the last.
    """
    num_last = num_keys - scores.shape[-1]
    chosen = scores.topk(num_kept - num_last, dim=-1).indices.sort(dim=-1).values
    last = torch.arange(scores.shape[-1], num_keys, device=scores.device)
    return torch.cat((chosen, last.expand(*chosen.shape[:-1], -1)), dim=-1)


def streaming_llm_kept(num_keys: int, num_kept: int, num_sinks: int, device: torch.device) -> Tensor:
    """Returns the cache indexes that StreamingLLM keeps, [num_kept] int64: the first `num_sinks`, and the last."""
    window = torch.arange(num_keys - num_kept + num_sinks, num_keys, device=device)
    return torch.cat((torch.arange(num_sinks, device=device), window))
