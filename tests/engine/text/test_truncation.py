import pytest

from mini_infer_engine.text.truncation import Truncation, TruncationSide, truncated
from mini_infer_engine.text.validation import ParameterError

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("tokens", "side", "left"),
    [
        (5, "left", PROMPT),
        (9, "left", PROMPT),
        (2, "left", [4, 5]),
        (2, "right", [1, 2]),
        (0, "left", []),
        (0, "right", []),
        (-1, "left", [3, 4, 5]),
        (-1, "right", [1, 2, 3]),
    ],
)
def test_truncated_prompt_by_side_and_length(tokens: int, side: TruncationSide, left: list[int]) -> None:
    room = 10 if tokens > 0 else 3
    assert truncated([PROMPT], Truncation(tokens, side), max_model_len=room + 2, max_tokens=2) == [left]


def test_a_prompt_is_unchanged_when_no_truncation_is_requested() -> None:
    assert truncated([PROMPT], None, max_model_len=3, max_tokens=2) == [PROMPT]


def test_truncation_is_refused_when_it_leaves_no_room_for_the_output() -> None:
    with pytest.raises(ParameterError, match=r"truncate_prompt_tokens is 9.* 8"):
        truncated([PROMPT], Truncation(9), max_model_len=10, max_tokens=2)
