"""Paged keys and values as kernels see them, with poison wherever nothing should be read; and attention in fp64."""

from dataclasses import dataclass

import torch

from tests.gpu.device import DEVICE, normal


@dataclass
class Paged:
    """`pool` is one layer's view of a pool of two; `keys` and `values` are each sequence's, unpaged, in fp64."""

    pool: torch.Tensor  # [pages, 2, page_size, kv_heads, head_dim]
    tables: torch.Tensor  # [sequences, width] int32
    keys: list[torch.Tensor]  # [length, kv_heads, head_dim]
    values: list[torch.Tensor]


def make_paged(lengths: list[int], page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Paged:
    width = -(-max(lengths) // page_size)
    pages = len(lengths) * width + 3
    layers = torch.full((pages, 2, 2, page_size, kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    pool = layers[:, 1]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: len(lengths) * width].to(DEVICE)
    tables = order.view(len(lengths), width)
    keys, values = [], []
    for index, length in enumerate(lengths):
        tokens = torch.arange(length, device=DEVICE)
        own_pages, offsets = tables[index][tokens // page_size], tokens % page_size
        for half, kept in enumerate((keys, values)):
            made = normal(length, kv_heads, head_dim, dtype=dtype, seed=2 * index + half)
            pool[own_pages, half, offsets] = made
            kept.append(made.double())
    return Paged(pool, tables.to(torch.int32), keys, values)


def strided_queries(tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, q_heads, head_dim], a view into packed q, k and v as the model makes them."""
    packed = normal(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=99)
    return packed[:, : q_heads * head_dim].unflatten(1, (q_heads, head_dim))


def make_sinks(q_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of attention sinks [q_heads]: some take nearly everything, some nearly nothing."""
    return normal(q_heads, dtype=dtype, seed=11) * 4


def exact_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_position: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    last_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of tokens from `first_position` on, up to `last_keys` [tokens] or causal: [tokens, q_heads * head_dim]
    fp64.
    """
    group = q.shape[1] // keys.shape[1]
    positions = torch.arange(first_position, first_position + q.shape[0], device=q.device)[:, None]
    places = torch.arange(keys.shape[0], device=q.device)
    ends = positions if last_keys is None else last_keys[:, None]
    seen = (places <= ends) & (places > positions - (window or 1 << 30))
    scores = torch.einsum("qhd,thd->hqt", q.double(), keys.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[0]]
    return torch.einsum("hqt,thd->qhd", weights, values.repeat_interleave(group, 1)).flatten(1)
