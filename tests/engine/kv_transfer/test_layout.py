"""Which bytes of two page pools are the same tokens': copied piece by piece, every token arrives where it belongs."""

from collections import Counter

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import (
    KVLayout,
    Span,
    alignment,
    layout_fault,
    layout_refusal,
    pieces,
    shares_to_read,
    shares_to_write,
)

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
def test_every_token_is_copied_to_its_place_when_page_sizes_differ(their_size: int, first: int, end: int) -> None:
    theirs = replace(LAYOUT, page_size=their_size)
    first -= first % alignment(LAYOUT, theirs)
    our_pages = [5, 0, 3, 9, 1, 2, 7]
    their_pages = [4, 1, 8, 6, 0, 2, 3][: -(-112 // their_size)]
    source, expected = filled(LAYOUT, our_pages, end), filled(theirs, their_pages, end)
    target = np.full_like(expected, -1)
    flat, out = source.view(np.uint8).reshape(-1), target.view(np.uint8).reshape(-1)
    for ours, other, size in pieces(LAYOUT, theirs, Span(our_pages, their_pages, first, end)):
        out[other : other + size] = flat[ours : ours + size]
    for token in range(first, end):
        page, offset = their_pages[token // their_size], token % their_size
        assert (target[page, :, :, offset] == expected[page, :, :, offset]).all(), token


def test_layers_are_copied_one_by_one() -> None:
    span = Span([2, 0], [1, 3], 0, 32)
    whole = pieces(LAYOUT, LAYOUT, span)
    parts = [pieces(LAYOUT, LAYOUT, structs.replace(span, layers=(layer, layer + 1))) for layer in range(3)]
    assert sum(int(part[:, 2].sum()) for part in parts) == int(whole[:, 2].sum()) == 2 * LAYOUT.page_bytes
    assert [int(part[0, 0]) for part in parts] == [2 * LAYOUT.page_bytes + n * LAYOUT.layer_bytes for n in range(3)]


def test_equal_pages_are_copied_as_one_piece_each() -> None:
    table = pieces(LAYOUT, LAYOUT, Span([7, 1, 2], [0, 5, 6], 16, 40))
    assert table.tolist() == [
        [1 * LAYOUT.page_bytes, 5 * LAYOUT.page_bytes, LAYOUT.page_bytes],
        [2 * LAYOUT.page_bytes, 6 * LAYOUT.page_bytes, LAYOUT.page_bytes],
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 4}, "num_layers"),
        ({"halves": 1}, "halves"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"num_heads": 1}, "total_heads"),
        ({"tp_size": 2}, "total_heads"),
    ],
)
def test_the_refusal_names_the_difference_when_layouts_do_not_match(changes: dict[str, object], named: str) -> None:
    assert named in layout_refusal(LAYOUT, replace(LAYOUT, **changes))
    assert layout_refusal(LAYOUT, replace(LAYOUT, page_size=128)) == ""
    assert layout_refusal(LAYOUT, replace(LAYOUT, tp_size=2, num_heads=1)) == ""
    assert layout_refusal(LAYOUT, replace(LAYOUT, tp_size=4, num_heads=1, copies=2)) == ""


STATES = KVLayout(num_layers=2, halves=1, page_size=1, num_heads=3, head_bytes=512, dtype="states after bfloat16")


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (STATES, ""),
        (None, "recurrent states"),
        (replace(STATES, num_layers=3), "num_layers"),
        (replace(STATES, num_heads=4), "num_heads"),
        (replace(STATES, dtype="states after float32"), "dtype"),
        (replace(STATES, tp_size=2), "tp_size"),
    ],
)
def test_the_refusal_names_the_difference_when_recurrent_states_do_not_match(
    theirs: KVLayout | None, named: str
) -> None:
    refusals = [
        layout_refusal(replace(LAYOUT, states=STATES), replace(LAYOUT, states=theirs)),
        layout_refusal(replace(LAYOUT, states=theirs), replace(LAYOUT, states=STATES)),
    ]
    assert all(named in refusal and bool(refusal) is bool(named) for refusal in refusals)


def test_a_layout_has_a_fault_when_its_states_are_no_slots_of_its_ranks() -> None:
    assert layout_fault(replace(LAYOUT, states=STATES)) == ""
    for states in (replace(STATES, page_size=2), replace(STATES, tp_size=2), replace(STATES, states=STATES)):
        assert layout_fault(replace(LAYOUT, states=states))


def test_layouts_match_when_only_floating_point_dtypes_differ() -> None:
    ours = replace(LAYOUT, dtype="float32", head_bytes=64)
    half = replace(ours, dtype="bfloat16", head_bytes=32)
    assert layout_refusal(ours, half) == layout_refusal(half, ours) == ""
    assert layout_refusal(half, replace(half, dtype="float16")) == ""
    assert "head_elements of the KV cache is 16 here and 32 there" in layout_refusal(ours, replace(half, head_bytes=64))
    quantised = replace(half, dtype="int8", head_bytes=16, scale_bytes=2)
    assert "scale_bytes" in layout_refusal(half, quantised)


def ranks_of(size: int, total_heads: int) -> KVLayout:
    """A group's layout, whose ranks hold the same head where there are more ranks than heads."""
    num_heads, copies = max(1, total_heads // size), max(1, size // total_heads)
    return replace(LAYOUT, tp_size=size, num_heads=num_heads, copies=copies)


def pools(layout: KVLayout, pages: list[int], num_tokens: int, *, are_filled: bool) -> list[np.ndarray]:
    """Of each rank; each token has its own number in each layer, half and head of the model, else there is -1."""
    found = []
    for rank in range(layout.tp_size):
        pool = filled(layout, pages, num_tokens if are_filled else 0)
        if are_filled:
            first = rank // layout.copies * layout.num_heads
            pool = np.where(pool < 0, pool, pool * 100 + first + np.arange(layout.num_heads, dtype=np.int32))
        found.append(pool)
    return found


@pytest.mark.parametrize("total_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("our_size", "their_size"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("how", ["write", "read"])
@pytest.mark.parametrize("their_page_size", [16, 32])
def test_every_head_is_copied_to_every_rank_that_has_it(
    total_heads: int, our_size: int, their_size: int, how: str, their_page_size: int
) -> None:
    ours = ranks_of(our_size, total_heads)
    theirs = replace(ranks_of(their_size, total_heads), page_size=their_page_size)
    span = Span([2, 0, 1], [1, 2, 0], 0, 40)
    here = pools(ours, [2, 0, 1], 40, are_filled=how == "write")
    there = pools(theirs, [1, 2, 0], 40, are_filled=how == "read")
    moved: Counter[int] = Counter()
    for rank in range(our_size):
        for share in (shares_to_write if how == "write" else shares_to_read)(ours, rank, theirs):
            mine, other = (pool.view(np.uint8).reshape(-1) for pool in (here[rank], there[share.their_rank]))
            for our_offset, their_offset, size in pieces(ours, theirs, span, share):
                if how == "write":
                    other[their_offset : their_offset + size] = mine[our_offset : our_offset + size]
                else:
                    mine[our_offset : our_offset + size] = other[their_offset : their_offset + size]
            moved[share.their_rank] += share.count
    for got, layout, pages in ((here, ours, [2, 0, 1]), (there, theirs, [1, 2, 0])):
        for pool, expected in zip(got, pools(layout, pages, 40, are_filled=True), strict=True):
            for token in range(40):
                page, offset = pages[token // layout.page_size], token % layout.page_size
                assert (pool[page, :, :, offset] == expected[page, :, :, offset]).all()
    if how == "write":
        assert set(moved.values()) == {theirs.num_heads}  # once


def test_quantised_pages_are_copied_whole_with_their_scales() -> None:
    """A run of tokens has its scales elsewhere in the page; engines that keep them otherwise are named."""
    ours = replace(LAYOUT, dtype="int8", head_bytes=64, scale_bytes=2)
    assert ours.page_bytes == 3 * 2 * 16 * 2 * (64 + 2)
    assert layout_refusal(ours, ours) == ""
    others = {"dtype": "float8_e4m3fn", "scale_bytes": 0, "page_size": 32, "tp_size": 2}
    for name, value in others.items():
        changes = {name: value} | ({"num_heads": 1} if name == "tp_size" else {})
        assert f"{name} of the KV cache is" in layout_refusal(ours, replace(ours, **changes))
    moved = pieces(ours, ours, Span([5, 0], [1, 2], 0, 20))
    assert moved.tolist() == [
        [5 * ours.page_bytes, ours.page_bytes, ours.page_bytes],
        [0, 2 * ours.page_bytes, ours.page_bytes],
    ]
