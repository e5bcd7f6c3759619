"""Selects pages by bounds of their keys (Quest, Tang et al. 2024, arXiv 2406.10774) in plain torch.

It is the reference for the kernels of `kernels.attention.page_selection`.
"""

import torch
from torch import Tensor

from mini_infer_engine.config.options.kv_selection import FIRST_PAGES, LAST_PAGES


def key_bounds(keys: Tensor) -> Tensor:
    """Returns the smallest and the largest element of keys [pages, page_size, kv_heads, head_dim], over the tokens:
    [pages, kv_heads, 2, head_dim].
    """
    return torch.stack((keys.amin(1), keys.amax(1)), dim=2)


def page_scores(queries: Tensor, bounds: Tensor) -> Tensor:
    """Returns the largest score that any key of a page can have with any query of a KV head: [rows, kv_heads, pages]
    fp32.

    queries [rows, kv_heads, group, head_dim]; bounds [rows, pages, kv_heads, 2, head_dim]. A head's bound is the sum
    over its elements of max(q * smallest, q * largest). Of the query heads of a group, which read the same pages, the
    largest counts, so that a key that matters much to one of them is read.
    """
    wide, smallest, largest = queries.float(), *bounds.float().unbind(3)
    products = torch.einsum("rhgd,rphd->rhgp", wide.clamp(min=0), largest)
    products += torch.einsum("rhgd,rphd->rhgp", wide.clamp(max=0), smallest)
    return products.amax(2)


def selected_lengths(kv_lengths: Tensor, budget: int, page_size: int) -> Tensor:
    """Returns how many tokens there are in the selected pages before the new one, given those in all pages [rows].

    The newest page is the last of them, and all others are complete. Rows of -1 remain so.
    """
    pages = (kv_lengths // page_size).clamp(max=budget - 1)
    return torch.where(kv_lengths < 0, kv_lengths, pages * page_size + kv_lengths % page_size)


def select_pages(scores: Tensor, complete: Tensor, budget: int) -> Tensor:
    """Returns the places in the page table of the pages to attend to, ascending: [rows, kv_heads, budget].

    scores [rows, kv_heads, pages] of pages, of which the first `complete` [rows] are complete; the new token is in the
    page after them. Rows of fewer than `budget` pages have all of them, then that of the new token again. The first
    pages and the last are always selected, then those of the highest scores; of equal ones the first.
    """
    places = torch.arange(scores.shape[2], device=scores.device)
    newest = complete[:, None, None]
    is_forced = (places < FIRST_PAGES) | (places > newest - LAST_PAGES)
    ranked = scores.masked_fill(is_forced, float("inf")).masked_fill(places > newest, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    chosen = order.clamp(max=newest).sort(dim=-1).values
    missing = budget - chosen.shape[2]
    return torch.cat((chosen, newest.expand(*chosen.shape[:2], missing)), dim=2) if missing > 0 else chosen
