"""Scores cached tokens of one layer by the attention that they get, and chooses those that a policy keeps.

The scores are those of NVIDIA's kvpress: of its SnapKVPress (Li et al. 2024, arXiv 2404.14469), its StreamingLLMPress
(Xiao et al. 2023, arXiv 2309.17453), and its ObservedAttentionPress for H2O (Zhang et al. 2023, arXiv 2306.14048). Pure
functions of tensors; nothing here knows pages.
"""

import torch
from torch import Tensor
from torch.nn import functional

_LEAST_KERNEL, _LEAST_KERNELS = 5, 4
"""A kernel is no larger than a fourth of the keys that it scores, but has five of them."""
_MOST_SCRATCH_BYTES = 256 << 20
_BYTES_PER_WEIGHT = 12
"""Bytes of an attention weight while it is computed: logits, their softmax in fp32, and a copy."""


def snapkv_scores(q: Tensor, k: Tensor, scale: float, kernel: int) -> Tensor:
    """Returns the scores [kv_heads, keys - queries] fp32 of all keys but the last, which are those of the queries.

    q [queries, heads, head_dim] are the rotated queries of the last tokens, k [keys, kv_heads, head_dim] the keys of
    all. A score is the attention that the queries of the KV head's group pay to the key and its neighbours, on average
    over `kernel` of them, an odd number; over fewer where that is much of all keys, which would have equal scores then.
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
    kernel = min(kernel, max(_LEAST_KERNEL, num_before // _LEAST_KERNELS | 1))
    return functional.avg_pool1d(torch.cat(parts), kernel, stride=1, padding=kernel // 2)


def snapkv_kept(scores: Tensor, num_keys: int, num_kept: int) -> Tensor:
    """Returns the cache indexes that SnapKV keeps, [..., num_kept] int64, ascending: the tokens with the highest scores
    [..., tokens before the last], and the last.
    """
    num_last = num_keys - scores.shape[-1]
    chosen = scores.topk(num_kept - num_last, dim=-1).indices.sort(dim=-1).values
    last = torch.arange(scores.shape[-1], num_keys, device=scores.device)
    return torch.cat((chosen, last.expand(*chosen.shape[:-1], -1)), dim=-1)


def attention_sums(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns the attention that the last tokens pay to each, summed over them: [kv_heads, keys] fp32.

    q [queries, heads, head_dim] are the rotated queries of the last tokens, k [keys, kv_heads, head_dim] the keys of
    all. The heads of a KV head's group are averaged.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, kv_heads, _ = k.shape
    group = num_heads // kv_heads
    sums = torch.zeros(kv_heads, num_keys, dtype=torch.float32, device=q.device)
    keys = k.permute(1, 2, 0)
    step = max(1, _MOST_SCRATCH_BYTES // (num_heads * num_keys * _BYTES_PER_WEIGHT))
    places = torch.arange(num_keys, device=q.device)
    for begin in range(0, num_queries, step):
        some = q[begin : begin + step]
        num_seen = num_keys - num_queries + begin + len(some)
        grouped = some.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # [kv_heads, group * queries, head_dim]
        logits = torch.bmm(grouped, keys[..., :num_seen]).mul_(scale).view(kv_heads, group, len(some), num_seen)
        last = places[num_seen - len(some) : num_seen].unsqueeze(1)
        logits.masked_fill_(places[:num_seen] > last, float("-inf"))
        sums[:, :num_seen] += logits.softmax(dim=-1, dtype=torch.float32).sum(dim=(1, 2)).div_(group)
    return sums


def h2o_kept(sums: Tensor, num_kept: int, *, is_first: bool) -> Tensor:
    """Returns the cache indexes that H2O keeps, [..., num_kept] int64, ascending, by sums of attention [..., tokens].

    The first compaction of a sequence takes the highest attention on average over the queries that saw a token, as all
    queries are known. Later ones keep the newest half, which few queries have seen, and the heavy hitters of the rest.
    """
    num_keys = sums.shape[-1]
    if is_first:
        num_queries = torch.arange(num_keys, 0, -1, device=sums.device)
        return (sums / num_queries).topk(num_kept, dim=-1).indices.sort(dim=-1).values
    num_newest = num_kept // 2
    heavy = sums[..., : num_keys - num_newest].topk(num_kept - num_newest, dim=-1).indices.sort(dim=-1).values
    newest = torch.arange(num_keys - num_newest, num_keys, device=sums.device)
    return torch.cat((heavy, newest.expand(*heavy.shape[:-1], -1)), dim=-1)


def streaming_llm_kept(num_keys: int, num_kept: int, num_sinks: int, device: torch.device) -> Tensor:
    """Returns the cache indexes that StreamingLLM keeps, [num_kept] int64: the first `num_sinks`, and the last."""
    window = torch.arange(num_keys - num_kept + num_sinks, num_keys, device=device)
    return torch.cat((torch.arange(num_sinks, device=device), window))
