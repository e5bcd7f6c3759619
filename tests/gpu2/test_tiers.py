"""Main memory below the pools of two GPUs: passes of both follow their parts of a load."""

from typing import Any

import pytest

from tests.gpu2.support import TWO_GPUS, answer_of

pytestmark = TWO_GPUS
HOST = {"kv_host_memory": 1 << 28}


@pytest.fixture(scope="module")
def alone() -> Any:
    (texts,) = answer_of("tiers_program", {"settings": {}})["texts"]
    return [pytest.approx(text, abs=1e-3) for text in texts]


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enforce_eager": True},
        {"tensor_parallel_size": 2, "disable": ["one_shot_all_reduce"]},
        {"pipeline_parallel_size": 2},
    ],
    ids=["tensor", "tensor-eager", "tensor-nccl", "pipeline"],
)
def test_texts_are_those_of_one_gpu_when_loads_of_both_come_late(settings: dict[str, Any], alone: Any) -> None:
    found = answer_of("tiers_program", {"settings": HOST | settings})
    assert found["texts"] == [alone] * 4
    assert found["followed"] == [43, 25] * 3
    assert (found["hit"], found["wrong"]) == (3 * 16 * (43 + 25), 0)
