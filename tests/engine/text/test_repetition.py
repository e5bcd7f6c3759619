import pytest

from mini_infer_engine.core.request import Output, RepetitionDetectionParams, Request, SamplingParams
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.repetition import REPETITION, repeats


@pytest.mark.parametrize(
    ("token_ids", "smallest", "largest", "count", "expected"),
    [
        ([1, 2, 1, 2, 1, 2], 0, 2, 3, True),
        ([1, 2, 1, 2, 1, 2], 0, 1, 3, False),
        ([1, 2, 1, 2], 0, 2, 3, False),
        ([9, 7, 7, 7], 0, 4, 3, True),
        ([9, 7, 7, 7], 2, 4, 3, False),
        ([7, 7, 7, 7], 2, 4, 2, True),
        ([7, 7, 7, 8], 0, 4, 3, False),
        ([7, 7, 7], 0, 0, 0, False),
        ([], 0, 3, 2, False),
    ],
)
def test_repetition_detection_by_pattern_and_count(
    token_ids: list[int], smallest: int, largest: int, count: int, expected: bool
) -> None:
    params = RepetitionDetectionParams(min_pattern_size=smallest, max_pattern_size=largest, min_count=count)
    assert repeats(token_ids, params) is expected


def test_an_output_ends_at_the_token_that_completes_a_repetition() -> None:
    params = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
    sampling = SamplingParams(repetition_detection=params, max_tokens=None)
    text = OutputText(Request(request_id="r", prompt_token_ids=[1], sampling=sampling), None)
    assert text.push(Output(request_id="r", token_ids=[5, 6])).finish_reason is None
    last = text.push(Output(request_id="r", token_ids=[5, 6, 7, 7]))
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([5, 6], "repetition", REPETITION)
    assert text.needs_abort
    assert text.token_ids == [5, 6, 5, 6]
