"""Prompt look-up."""

import pytest

from mini_infer_engine.speculation.ngram import look_up


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 9, 9, 1, 2, 8, 8, 8, 1, 2], [8, 8, 8]),
        ([7, 1, 2, 3, 0, 5, 1, 2, 4, 0, 7, 1, 2], [3, 0, 5]),
        ([1, 2, 3, 4], []),
        ([4, 1, 2, 3, 5, 3], []),
        ([5, 5, 5], [5, 5, 5]),
        ([1, 2, 1, 2], [1, 2, 1]),
        ([1], []),
        ([], []),
    ],
    ids=["follows", "latest", "longest", "nothing", "too short", "one token", "period", "one", "none"],
)
def test_ngram_lookup_finds_what_followed_the_last_tokens(tokens: list[int], found: list[int]) -> None:
    assert look_up(tokens, 3, longest=3, shortest=2) == found
