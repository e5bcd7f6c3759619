"""Bounds of keys, and the pages that a decode selects by them, against what a loop says."""

import pytest
import torch

from mini_infer_engine.config.options.kv_selection import DENSE_LAYERS, FIRST_PAGES, LAST_PAGES
from mini_infer_engine.core.batch import PageCopy, PageSwap, Transfers
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.runtime.attention.page_scores import key_bounds, page_scores, select_pages, selected_lengths
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds

CPU = torch.device("cpu")
SPEC = KVSpec(num_layers=5, page_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def test_no_key_of_a_page_scores_above_its_bound_and_one_query_head_reaches_the_largest() -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(7, 16, 2, 8), torch.randn(3, 2, 4, 8)
    bounds = key_bounds(keys)
    scores = page_scores(queries, bounds.expand(3, -1, -1, -1, -1))
    products = torch.einsum("rhgd,pthd->rhgpt", queries, keys)
    assert (scores >= products.amax((2, 4)) - 1e-5).all()
    for row, head, page in ((0, 0, 0), (2, 1, 6)):
        smallest, largest = bounds[page, head]
        of_heads = [
            sum(max(float(q * low), float(q * high)) for q, low, high in zip(query, smallest, largest, strict=True))
            for query in queries[row, head]
        ]
        assert scores[row, head, page] == pytest.approx(max(of_heads), rel=1e-5)
    of_one_key = page_scores(queries, key_bounds(keys[:, :1]).expand(3, -1, -1, -1, -1))
    assert torch.allclose(of_one_key, products[..., 0].amax(2), atol=1e-5), "the bound of one key is its score"


@pytest.mark.parametrize("budget", [4, 5, 9, 30])
def test_the_first_pages_the_last_and_the_highest_bounds_are_selected(budget: int) -> None:
    torch.manual_seed(1)
    scores, complete = torch.randn(6, 2, 20), torch.tensor([0, 3, 4, 5, 12, 19])
    chosen = select_pages(scores, complete, budget)
    assert chosen.shape == (6, 2, budget)
    for row, newest in enumerate(complete.tolist()):
        for head in range(2):
            always = {place for place in range(newest + 1) if place < FIRST_PAGES or place > newest - LAST_PAGES}
            others = sorted(set(range(newest + 1)) - always, key=lambda place: -float(scores[row, head, place]))
            expected = sorted({*always, *others[: budget - len(always)]})
            assert chosen[row, head, : len(expected)].tolist() == expected
            assert (chosen[row, head, len(expected) :] == newest).all()


def test_the_first_of_equal_bounds_are_selected() -> None:
    assert select_pages(torch.zeros(1, 1, 9), torch.tensor([8]), 5).tolist() == [[[0, 1, 2, 7, 8]]]


@pytest.mark.parametrize(
    ("kv_length", "expected"),
    [(-1, -1), (0, 0), (15, 15), (16, 16), (63, 63), (64, 48), (79, 63), (80, 48), (1000, 56), (1007, 63)],
)
def test_selected_pages_end_with_the_newest_as_full_as_it_is(kv_length: int, expected: int) -> None:
    assert selected_lengths(torch.tensor([kv_length]), 4, 16).tolist() == [expected]


@pytest.mark.parametrize("place", [1, 17, 61])
@pytest.mark.parametrize("head", [0, 3, 5])
def test_a_needle_is_always_selected_wherever_it_is_and_whichever_query_head_seeks_it(place: int, head: int) -> None:
    """One key far away has a large product with the query of one head of the first KV head; all others are noise."""
    torch.manual_seed(place * 10 + head)
    keys, queries = torch.randn(64, 16, 2, 64), torch.randn(1, 2, 6, 64)
    keys[place, 11, 0] = queries[0, 0, head] * 3
    bounds = key_bounds(keys).unsqueeze(0)
    chosen = select_pages(page_scores(queries, bounds), torch.tensor([63]), 4)
    assert place in chosen[0, 0]
    assert torch.einsum("d,ptd->pt", queries[0, 0, head], keys[:, :, 0]).amax(1).argmax() == place


def test_bounds_follow_their_pages_when_those_are_copied_or_swapped() -> None:
    bounds = KeyBounds(SPEC, num_pages=5, budget_pages=4, device=CPU, num_host_pages=2)
    bounds.pages[1] = torch.arange(bounds.pages[1].numel(), dtype=torch.float32).view(bounds.pages[1].shape)
    before = bounds.pages[1].clone()
    bounds.copy([PageCopy(1, 3, 16), PageCopy(3, 2, 16)])
    assert torch.equal(bounds.pages[2], before)
    bounds.swap(Transfers(swap_out=[PageSwap(1, 0)]))
    bounds.pages[1].zero_()
    bounds.swap(Transfers(swap_in=[PageSwap(4, 0)]))
    assert torch.equal(bounds.pages[4], before)
    assert not bounds.pages[0].any()


def test_bounds_take_two_keys_a_page_in_layers_that_select() -> None:
    bounds = KeyBounds(SPEC, num_pages=9, budget_pages=4, device=CPU)
    assert KeyBounds.page_bytes(SPEC) == 3 * 2 * 2 * 8 * 4
    assert bounds.pages.nbytes == 10 * KeyBounds.page_bytes(SPEC)
    assert [bounds.of_layer(layer) is None for layer in range(5)] == [layer < DENSE_LAYERS for layer in range(5)]
    of_first = KVSpec(num_layers=2, page_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    assert KeyBounds.page_bytes(of_first) == 0, "a model of two layers selects nothing"
