"""What policies keep, beside references that are written from the papers with loops over heads, queries and keys."""

import math

import pytest
import torch

from mini_infer_engine.runtime.eviction import scores
from mini_infer_engine.runtime.eviction.scores import (
    attention_sums,
    h2o_kept,
    snapkv_kept,
    snapkv_scores,
    streaming_llm_kept,
)


def attention_of(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns the causal attention of the last queries [queries, dim] to keys [keys, dim], one query at a time."""
    num_queries, num_keys = len(q), len(k)
    weights = torch.zeros(num_queries, num_keys, dtype=torch.float64)
    for index, query in enumerate(q.double()):
        num_seen = num_keys - num_queries + index + 1
        exponents = [math.exp(float(query @ key) * scale) for key in k.double()[:num_seen]]
        weights[index, :num_seen] = torch.tensor(exponents, dtype=torch.float64) / sum(exponents)
    return weights


def snapkv_of_the_paper(q: torch.Tensor, k: torch.Tensor, scale: float, kernel: int) -> torch.Tensor:
    """Section 4 of arXiv 2404.14469: the window's queries vote, and votes are pooled over neighbours."""
    num_queries, num_heads, _ = q.shape
    num_keys, kv_heads, _ = k.shape
    group, num_before = num_heads // kv_heads, num_keys - num_queries
    votes = torch.zeros(kv_heads, num_before, dtype=torch.float64)
    for head in range(num_heads):
        votes[head // group] += attention_of(q[:, head], k[:, head // group], scale)[:, :num_before].mean(0) / group
    pooled = torch.zeros_like(votes)
    for place in range(num_before):
        pooled[:, place] = votes[:, max(0, place - kernel // 2) : place + kernel // 2 + 1].sum(1) / kernel
    return pooled


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    ("num_keys", "kernel", "used"), [(9, 5, 5), (40, 5, 5), (9, 63, 5), (100, 63, 23), (300, 63, 63)]
)
def test_snapkv_keeps_what_the_papers_votes_choose(
    num_heads: int, kv_heads: int, num_keys: int, kernel: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(num_keys)
    q, k = torch.randn(8, num_heads, 16) * 2, torch.randn(num_keys, kv_heads, 16) * 2
    expected = snapkv_of_the_paper(q, k, 0.25, used)
    made = snapkv_scores(q, k, 0.25, kernel)
    torch.testing.assert_close(made.double(), expected, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(scores, "_MOST_SCRATCH_BYTES", 1)  # one head at a time
    torch.testing.assert_close(snapkv_scores(q, k, 0.25, kernel), made)
    kept = snapkv_kept(made, num_keys, 9)
    for head in range(kv_heads):
        order = sorted(range(num_keys - 8), key=lambda key: -float(expected[head, key]))
        assert kept[head].tolist() == [*sorted(order[:1]), *range(num_keys - 8, num_keys)]


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 4), (6, 2)])
def test_attention_is_summed_over_the_queries_of_all_chunks(
    num_heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    q, k = torch.randn(21, num_heads, 16) * 2, torch.randn(21, kv_heads, 16) * 2
    group = num_heads // kv_heads
    expected = torch.zeros(kv_heads, 21, dtype=torch.float64)
    for head in range(num_heads):
        expected[head // group] += attention_of(q[:, head], k[:, head // group], 0.25).sum(0) / group
    for most_bytes in (scores._MOST_SCRATCH_BYTES, 1):  # at once, and query by query
        monkeypatch.setattr(scores, "_MOST_SCRATCH_BYTES", most_bytes)
        made = attention_sums(q[:8], k[:8], 0.25)
        made = torch.nn.functional.pad(made, (0, 13)) + attention_sums(q[8:], k, 0.25)
        torch.testing.assert_close(made.double(), expected, rtol=1e-4, atol=1e-6)


def test_h2o_keeps_means_of_a_prompt_then_the_newest_half_and_heavy_hitters() -> None:
    sums = torch.tensor([[8.0, 1.0, 6.0, 0.1, 4.0, 0.3, 0.2, 0.9]])
    means = [1.0, 0.14, 1.0, 0.02, 1.0, 0.1, 0.1, 0.9]
    assert h2o_kept(sums, 4, is_first=True).tolist() == [sorted(sorted(range(8), key=lambda token: -means[token])[:4])]
    assert h2o_kept(sums, 4, is_first=False).tolist() == [[0, 2, 6, 7]]
    assert h2o_kept(sums, 5, is_first=False).tolist() == [[0, 2, 4, 6, 7]]


def test_streaming_llm_keeps_sinks_and_window() -> None:
    assert streaming_llm_kept(20, 8, 4, torch.device("cpu")).tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert streaming_llm_kept(9, 8, 4, torch.device("cpu")).tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
