"""Two stages of a pipeline on two GPUs: the text of one GPU, and the end of a rank."""

import signal
from typing import Any

import pytest

from tests.gpu2.support import TWO_GPUS, answer_of

pytestmark = TWO_GPUS
STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def alone() -> Any:
    return answer_of("engine_program", {"settings": {"dtype": "float32"}})["texts"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True}, {"step_depth": 0}, {"attention_backend": "torch"}, {"max_num_batched_tokens": 48}],
    ids=["graphs", "eager", "no-step-ahead", "torch", "small-passes"],
)
def test_the_text_of_two_stages_is_that_of_one_gpu_in_fp32(settings: dict[str, Any], alone: Any) -> None:
    found = answer_of("engine_program", {"settings": {"dtype": "float32"} | STAGES | settings})
    assert found["texts"] == alone


def test_bfloat16_repeats_itself() -> None:
    first, second = answer_of("engine_program", {"settings": STAGES})["texts"]
    assert first == second


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_a_stage_is_an_error_within_five_seconds(number: signal.Signals) -> None:
    found = answer_of("engine_program", {"settings": STAGES, "signal": int(number)})
    assert "rank 1 of the pipeline-parallel group" in found["reason"]
    assert found["took_s"] < 5.0
