import pytest

from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.text.validation import ParameterError, check_output_fits, check_prompt, check_sampling

WRONG: list[tuple[str, object]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", 1.5),
    ("min_p", -0.5),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", 2**63),
    ("stop", [""]),
    ("stop", ["x" * 2000]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [100]),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_sampling_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        check_sampling(SamplingParams(**{name: value}), 100, has_text=True)  # type: ignore[arg-type]
    assert caught.value.param == name


def test_sampling_values_at_the_ends_of_ranges_are_allowed() -> None:
    for params in (
        SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=-(2**63)),
        SamplingParams(temperature=2, top_p=1e-9, max_tokens=None, min_tokens=5000),
        SamplingParams(max_tokens=1, min_tokens=1, stop=["x"], stop_token_ids=[0, 99]),
    ):
        check_sampling(params, 100, has_text=True)


def test_stop_strings_are_refused_when_there_is_no_text() -> None:
    with pytest.raises(ParameterError, match="tokenizer"):
        check_sampling(SamplingParams(stop=["x"]), 100, has_text=False)
    with pytest.raises(ParameterError, match="detokenize"):
        check_sampling(SamplingParams(stop=["x"], detokenize=False), 100, has_text=True)


def test_a_prompt_must_leave_room_for_one_token() -> None:
    check_prompt([0, 99], 3, 100)
    for token_ids in ([], [0, 1, 2], [100], [-1]):
        with pytest.raises(ParameterError):
            check_prompt(token_ids, 3, 100)


def test_prompt_and_output_must_fit_into_the_context() -> None:
    check_output_fits(2, 3, 5)
    with pytest.raises(ParameterError, match="at most 3"):
        check_output_fits(2, 4, 5)
