"""An engine has some CUDA graphs when it is ready, and others follow in an order."""

import pytest

from mini_infer_engine.runtime.cuda.graph_sizes import GraphSizes, sizes_at_start


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ([], []),
        ([1], [1]),
        ([1, 2, 3], [1, 3]),
        ([1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 160, 256], [1, 4, 16, 64, 256]),
        ([32, 64, 128, 192, 512, 2048], [32, 128, 512, 2048]),
        ([1, 2, 4, 8, 9], [1, 4, 9]),
    ],
)
def test_few_graphs_are_captured_at_the_start_when_sizes_are_many(sizes: list[int], first: list[int]) -> None:
    assert sizes_at_start(sizes) == first


def captured(*chosen: int) -> GraphSizes:
    sizes = GraphSizes([1, 2, 4, 8])
    for size in chosen:
        sizes.captured(size)
    return sizes


@pytest.mark.parametrize(
    ("chosen", "rows", "fitting", "missed"),
    [
        ((), 3, 4, 4),
        ((8,), 3, 8, 4),
        ((8, 4), 3, 4, None),
        ((8, 1), 1, 1, None),
        ((8, 1), 0, 1, None),
        ((8, 1), 2, 8, 2),
    ],
)
def test_a_larger_graph_is_used_when_the_own_one_is_not_captured(
    chosen: tuple[int, ...], rows: int, fitting: int, missed: int | None
) -> None:
    sizes = captured(*chosen)
    sizes.requested(rows)
    assert sizes.fitting(rows) == fitting
    assert sizes.missed == missed


def test_nothing_is_missed_when_a_pass_has_more_rows_than_any_graph() -> None:
    sizes = captured(8)
    sizes.requested(9)
    assert sizes.missed is None


def test_nothing_is_left_when_all_sizes_are_captured() -> None:
    sizes = captured(8, 1)
    sizes.requested(3)
    assert sizes.left == [2, 4]
    sizes.captured(4)
    assert sizes.missed is None
    sizes.captured(2)
    assert sizes.left == []
