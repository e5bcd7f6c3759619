"""Tests which waiting inputs a pass of the pooling engine computes together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_engine.pooling.batches import choose_batch


@pytest.mark.parametrize(
    ("lengths", "budget", "most", "expected"),
    [
        ([5], 1, 8, [0]),  # longer than the budget: alone
        ([5, 5, 5], 10, 8, [0, 1]),
        ([5, 90, 6, 4], 18, 8, [0, 2, 3]),
        ([5, 90, 6, 4], 1000, 2, [0, 3]),
        ([90, 5, 6, 80], 200, 8, [0, 3]),
        ([5, 9, 9, 1, 1], 10, 8, [0, 4]),
    ],
)
def test_inputs_of_like_lengths_are_chosen(lengths: list[int], budget: int, most: int, expected: list[int]) -> None:
    assert choose_batch(lengths, budget, most) == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 12))
def test_a_pass_has_the_first_input_and_keeps_its_limits(lengths: list[int], budget: int, most: int) -> None:
    chosen = choose_batch(lengths, budget, most)
    assert 0 in chosen
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= most
    assert len(chosen) == 1 or len(chosen) * max(lengths[index] for index in chosen) <= budget
