"""Tensor parallelism on two GPUs: exact sums, the text of one GPU, and the end of a rank."""

import json
import signal
from typing import Any

import pytest

from tests.engine.server.dry_server import free_port
from tests.gpu2.support import TWO_GPUS, answer, asked, started

pytestmark = TWO_GPUS
ROUNDINGS = 8.0


@pytest.mark.parametrize("disabled", [[], ["pdl"], ["one_shot_all_reduce"]], ids=["pdl", "plain", "nccl"])
def test_sums_and_gathers_are_right_and_equal_on_both_gpus(disabled: list[str]) -> None:
    question = {"port": free_port(), "disabled": disabled}
    ranks = [started("rank_program", json.dumps(question | {"rank": rank})) for rank in range(2)]
    found = [answer(rank) for rank in ranks]
    assert found[0] == found[1]
    assert found[0]["kind"] == ("nccl" if "one_shot_all_reduce" in disabled else "one_shot+nccl")
    wrong = {name: error for name, error in found[0]["errors"].items() if not error <= ROUNDINGS}
    assert not wrong
    assert all(found[0]["gathered"].values()), found[0]["gathered"]


@pytest.fixture(scope="module")
def alone() -> Any:
    return asked("engine_program", {"settings": {"dtype": "float32"}})["texts"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True}, {"disable": ["one_shot_all_reduce"]}, {"disable": ["pdl"]}],
    ids=["graphs", "eager", "nccl", "no-pdl"],
)
def test_the_text_of_two_gpus_is_that_of_one_in_fp32(settings: dict[str, Any], alone: Any) -> None:
    found = asked("engine_program", {"settings": {"dtype": "float32", "tensor_parallel_size": 2} | settings})
    assert found["texts"] == alone


def test_bfloat16_repeats_itself() -> None:
    first, second = asked("engine_program", {"settings": {"tensor_parallel_size": 2}})["texts"]
    assert first == second


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_a_rank_is_an_error_within_five_seconds(number: signal.Signals) -> None:
    found = asked("engine_program", {"settings": {"tensor_parallel_size": 2}, "signal": int(number)})
    assert "rank 1 of the tensor-parallel group" in found["reason"]
    assert found["took_s"] < 6
