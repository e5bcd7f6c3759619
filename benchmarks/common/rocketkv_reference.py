"""RocketKV's second stage, hybrid sparse attention, in plain torch (Behnam et al. 2025, arXiv 2502.14051).

A decode attends to the tokens of highest approximate attention, among those that the first stage has kept. The
approximation reads bounds of small pages in a few elements: those in which the query heads of a KV head are largest,
and of each either the smallest or the largest key, by the sign of the queries' sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def approximate_attention(queries: Tensor, keys: Tensor, seen: Tensor, page_size: int, num_elements: int) -> Tensor:
    """Returns the approximate attention of each KV head's queries to each token, [rows, kv_heads, tokens] fp32.

    queries [rows, kv_heads, group, head_dim]; keys [rows, kv_heads, tokens, head_dim], of which `seen` [rows, tokens]
    are there. Tokens of a page have equal attention. It is averaged over the query heads of a group.
    """
    rows, kv_heads, num_tokens, head_dim = keys.shape
    absent = ~seen[:, None, :, None]
    padding = (0, 0, 0, -num_tokens % page_size)
    smallest, largest = (
        torch.nn.functional.pad(keys.masked_fill(absent, value), padding, value=value).view(
            rows, kv_heads, -1, page_size, head_dim
        )
        for value in (float("inf"), float("-inf"))
    )
    bounds = torch.stack((smallest.amin(3), largest.amax(3)))  # [2, rows, kv_heads, pages, head_dim]
    elements = queries.abs().mean(2).topk(num_elements, dim=-1).indices  # [rows, kv_heads, elements]
    few = queries.gather(3, elements[:, :, None].expand(-1, -1, queries.shape[2], -1))
    is_positive = few.sum(2) > 0  # [rows, kv_heads, elements]
    chosen = bounds.gather(4, elements[None, :, :, None].expand(2, -1, -1, bounds.shape[3], -1))
    chosen = torch.where(is_positive[:, :, None], chosen[1], chosen[0])  # [rows, kv_heads, pages, elements]
    scale = (head_dim * few.abs().sum(-1, keepdim=True) / queries.abs().sum(-1, keepdim=True)).sqrt()
    logits = (few @ chosen.transpose(2, 3)) / scale
    logits = logits.repeat_interleave(page_size, dim=-1)[..., :num_tokens].masked_fill(~seen[:, None, None], -torch.inf)
    return logits.softmax(dim=-1, dtype=torch.float32).mean(2)


class HybridSparseDecodes:
    """Stands in for the decodes that select pages in plain torch, with as many tokens and the same dense layers."""

    def __init__(
        self, pool: Any, bounds: Any, inputs: Any, dense: Any, *, page_size: int, element_divisor: int
    ) -> None:
        self._pool, self._bounds, self._dense = pool, bounds, dense
        self._page_size, self._divisor = page_size, element_divisor
        self._num_chosen = bounds.budget_pages * pool.spec.page_size
        places = torch.arange(dense.longest)
        self._seen = places <= inputs.kv_lengths[: dense.count, None]

    def attend(self, q: Tensor, kv: Tensor, layer: Any) -> Tensor:
        """Computes attention of the decodes' tokens, [rows, heads * head_dim]."""
        if self._bounds.of_layer(layer.layer) is None:
            return self._dense.attend(q, kv, layer)
        count, longest = self._dense.count, self._dense.longest
        halves = self._pool.gather(self._dense.gather_rows[layer.layer], count)
        keys, values = (half[:, :longest].transpose(1, 2) for half in halves)
        queries = q[:count].reshape(count, keys.shape[1], -1, keys.shape[3])
        attention = approximate_attention(
            queries, keys, self._seen, self._page_size, keys.shape[3] // self._divisor
        ).masked_fill(~self._seen[:, None], -1.0)
        chosen = attention.topk(min(self._num_chosen, longest), dim=-1).indices
        mask = torch.full_like(attention, -torch.inf).scatter_(2, chosen, 0.0)
        mask = mask.masked_fill_(~self._seen[:, None], -torch.inf).unsqueeze(2)
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask, scale=layer.scale)
        return mixed.reshape(count, -1)


@contextmanager
def hybrid_decodes(page_size: int, element_divisor: int) -> Iterator[None]:
    """Replaces page selection on CPUs by hybrid sparse attention with bounds of pages of this size, which reads one of
    so many elements.
    """
    made = partial(HybridSparseDecodes, page_size=page_size, element_divisor=element_divisor)
    with patch("mini_infer_engine.runtime.attention.torch_selection._SelectedDecodes", made):
        yield
