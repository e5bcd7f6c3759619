"""Which bytes of two page pools are the same tokens': copied piece by piece, every token arrives where it belongs."""

import numpy as np
import pytest
from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import KVLayout, alignment, layout_refusal, pieces

LAYOUT = KVLayout(num_layers=3, halves=2, page_size=16, num_heads=2, head_bytes=4, dtype="int32")


def filled(layout: KVLayout, pages: list[int], num_tokens: int) -> np.ndarray:
    """A pool in which each token of a sequence has its own number in each layer and half; all else is -1."""
    pool = np.full((max(pages) + 1, layout.num_layers, layout.halves, layout.page_size, layout.num_heads), -1, np.int32)
    for token in range(num_tokens):
        for layer in range(layout.num_layers):
            for half in range(layout.halves):
                page, offset = pages[token // layout.page_size], token % layout.page_size
                pool[page, layer, half, offset] = 1000 * token + 10 * layer + half
    return pool


@pytest.mark.parametrize("their_size", [16, 32, 64, 48])
@pytest.mark.parametrize(("first", "end"), [(0, 96), (48, 96), (96, 100), (0, 1)])
def test_every_token_arrives_where_it_belongs(their_size: int, first: int, end: int) -> None:
    theirs = replace(LAYOUT, page_size=their_size)
    first -= first % alignment(LAYOUT, theirs)
    our_pages = [5, 0, 3, 9, 1, 2, 7]
    their_pages = [4, 1, 8, 6, 0, 2, 3][: -(-112 // their_size)]
    source, expected = filled(LAYOUT, our_pages, end), filled(theirs, their_pages, end)
    target = np.full_like(expected, -1)
    flat, out = source.view(np.uint8).reshape(-1), target.view(np.uint8).reshape(-1)
    for ours, other, size in pieces(LAYOUT, our_pages, theirs, their_pages, (first, end)):
        out[other : other + size] = flat[ours : ours + size]
    for token in range(first, end):
        page, offset = their_pages[token // their_size], token % their_size
        assert (target[page, :, :, offset] == expected[page, :, :, offset]).all(), token


def test_layers_can_be_copied_one_by_one() -> None:
    pages, whole = [2, 0], pieces(LAYOUT, [2, 0], LAYOUT, [1, 3], (0, 32))
    parts = [pieces(LAYOUT, pages, LAYOUT, [1, 3], (0, 32), (layer, layer + 1)) for layer in range(3)]
    assert sum(int(part[:, 2].sum()) for part in parts) == int(whole[:, 2].sum()) == 2 * LAYOUT.page_bytes
    assert [int(part[0, 0]) for part in parts] == [2 * LAYOUT.page_bytes + n * LAYOUT.layer_bytes for n in range(3)]


def test_equal_pages_are_one_piece_each() -> None:
    table = pieces(LAYOUT, [7, 1, 2], LAYOUT, [0, 5, 6], (16, 40))
    assert table.tolist() == [
        [1 * LAYOUT.page_bytes, 5 * LAYOUT.page_bytes, LAYOUT.page_bytes],
        [2 * LAYOUT.page_bytes, 6 * LAYOUT.page_bytes, LAYOUT.page_bytes],
    ]


@pytest.mark.parametrize(
    "changes", [{"num_layers": 4}, {"halves": 1}, {"dtype": "bfloat16"}, {"tp_size": 2}, {"num_heads": 1}]
)
def test_what_cannot_be_copied_is_named(changes: dict[str, object]) -> None:
    refusal = layout_refusal(LAYOUT, replace(LAYOUT, **changes))
    assert next(iter(changes)) in refusal
    assert layout_refusal(LAYOUT, replace(LAYOUT, page_size=128)) == ""
