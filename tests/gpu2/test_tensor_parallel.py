"""Tensor parallelism on two GPUs: exact sums, the text of one GPU, and the end of a rank."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server.dry_server import free_port
from tests.gpu2.support import TWO_GPUS, answer, answer_of, end_of, ranks_of, started
from tests.support.tiny_models import DEEPSEEK, DEEPSEEK_V3, save_tiny_model, save_tiny_model_with_text

pytestmark = TWO_GPUS
ROUNDINGS = 8.0


def both_ranks(**question: Any) -> list[subprocess.Popen[str]]:
    """Both of `rank_program`."""
    question = {"port": free_port(), "disabled": []} | question
    return [started("rank_program", json.dumps(question | {"rank": rank})) for rank in range(2)]


@pytest.mark.parametrize(
    "disabled", [[], ["pdl"], ["pushed_sums"], ["one_shot_all_reduce"]], ids=["pdl", "plain", "pulled", "nccl"]
)
def test_sums_and_gathers_are_right_and_equal_on_both_gpus(disabled: list[str]) -> None:
    found = [answer(rank) for rank in both_ranks(disabled=disabled)]
    assert found[0] == found[1]
    assert found[0]["kind"] == ("nccl" if "one_shot_all_reduce" in disabled else "one_shot+nccl")
    wrong = {name: error for name, error in found[0]["errors"].items() if not error <= ROUNDINGS}
    assert not wrong
    assert all(found[0]["gathered"].values()), found[0]["gathered"]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="a matter of time: needs both GPUs for itself")
@pytest.mark.parametrize("sums", ["late", "late overlap"])
def test_an_all_reduce_waits_for_a_late_rank_once(sums: str) -> None:
    """Looks at whether the group is over must not take so long that the peer waits for long, and looks, too."""
    assert all(answer(rank)["errors"]["seconds"] < 0.25 for rank in both_ranks(only=sums))


@pytest.mark.parametrize("disabled", [[], ["pdl"]], ids=["pdl", "plain"])
def test_overlapped_sums_alternate_with_all_other_exchanges(disabled: list[str]) -> None:
    """In the same buffers, 200 of them: exact bits, and the same on both GPUs."""
    found = [answer(rank)["errors"] for rank in both_ranks(only="alternating", disabled=disabled)]
    assert found[0] == found[1]
    assert found[0]["wrong"] == 0
    assert found[0]["norm"] <= ROUNDINGS


def test_a_rank_that_waits_for_copies_of_a_lost_one_is_let_go() -> None:
    left, lost = both_ranks(only="lost")
    assert 0.2 < answer(left) < 2.0
    end_of(lost, 10)
    assert lost.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def alone() -> Any:
    return answer_of("engine_program", {"settings": {"dtype": "float32"}})["texts"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"disable": ["one_shot_all_reduce"]},
        {"disable": ["pdl"]},
        {"model_impl": "transformers"},
        {"model_impl": "transformers", "disable": ["one_shot_all_reduce"]},
    ],
    ids=["graphs", "eager", "nccl", "no-pdl", "transformers", "transformers-nccl"],
)
def test_the_text_of_two_gpus_is_that_of_one_in_fp32(settings: dict[str, Any], alone: Any) -> None:
    found = answer_of("engine_program", {"settings": {"dtype": "float32", "tensor_parallel_size": 2} | settings})
    assert found["texts"] == alone


@pytest.fixture(scope="module")
def long_alone() -> Any:
    return answer_of("engine_program", {"settings": LONG | {"enforce_eager": True}, "long": True})["texts"]


LONG: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 8192}


@pytest.mark.parametrize(
    ("settings", "overlaps"),
    [
        ({"enforce_eager": True}, True),
        ({}, True),  # graphs hold 4,096 tokens
        ({"enforce_eager": True, "disable": ["pdl"]}, True),
        ({"enforce_eager": True, "disable": ["overlapped_sums"]}, False),
    ],
    ids=["eager", "beside-graphs", "no-pdl", "off"],
)
def test_long_passes_say_what_one_gpu_does_in_fp32(settings: dict[str, Any], overlaps: bool, long_alone: Any) -> None:
    """Of several prompts, and of the rest of a prompt beside decode rows, whose sums hide behind products."""
    question = {"settings": LONG | {"tensor_parallel_size": 2} | settings, "long": True}
    found = answer_of("engine_program", question)
    assert found["texts"] == long_alone
    # Two of each layer but the last, which computes few tokens, in one pass or more.
    assert found["overlapped"] >= 14 if overlaps else found["overlapped"] == 0


def test_long_passes_repeat_themselves_in_bfloat16() -> None:
    settings = LONG | {"dtype": "bfloat16", "tensor_parallel_size": 2, "enforce_eager": True}
    question = {"settings": settings | {"enable_prefix_caching": False}, "long": True}
    first, second = answer_of("engine_program", question)["texts"]
    assert first == second


SHAPE = {"hidden_size": 256, "moe_intermediate_size": 128}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": SHAPE | {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
    "deepseek_v2": DEEPSEEK | SHAPE,
    "deepseek_v3": DEEPSEEK_V3 | SHAPE,
}


@pytest.fixture
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random one."""
    save_tiny_model_with_text(tmp_path, request.param, **MIXTURES[request.param])
    return tmp_path


@pytest.mark.parametrize(
    ("mixture", "eager", "whole"),
    [
        ("qwen3_moe", False, True),
        ("qwen3_moe", True, True),
        ("deepseek_v2", False, False),
        ("deepseek_v2", True, True),
        ("deepseek_v3", False, False),
        ("deepseek_v3", False, True),
    ],
    indirect=["mixture"],
)
def test_experts_on_two_gpus_say_what_one_gpu_does_in_fp32(mixture: Path, eager: bool, whole: bool) -> None:
    """Whole ones or shares of all, beside latent attention or usual one."""
    question = {"model": str(mixture)}
    settings = {"dtype": "float32", "enforce_eager": eager}
    one = answer_of("engine_program", question | {"settings": settings})
    two = {"tensor_parallel_size": 2, "enable_expert_parallel": whole}
    assert answer_of("engine_program", question | {"settings": settings | two})["texts"] == one["texts"]


def test_the_text_of_two_engines_is_that_of_one(alone: Any) -> None:
    found = answer_of("engine_program", {"settings": {"dtype": "float32", "data_parallel_size": 2}})
    assert found["texts"] == alone


def test_bfloat16_repeats_itself() -> None:
    first, second = answer_of("engine_program", {"settings": {"tensor_parallel_size": 2}})["texts"]
    assert first == second


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_layers_are_reported_when_the_slower_rank_has_computed_them(eager: bool, tmp_path: Path) -> None:
    """Whoever is given pages meanwhile reads those of both ranks."""
    num_layers, late_s = 6, 0.004
    save_tiny_model(tmp_path, "qwen3", hidden_size=256, head_dim=64, num_hidden_layers=num_layers)
    settings = {"model": str(tmp_path), "enforce_eager": eager, "kv_cache_memory": 1 << 26, "max_num_seqs": 8}
    question = {"port": free_port(), "settings": settings}
    ranks = [started("layers_program", json.dumps(question | {"rank": rank})) for rank in range(2)]
    for reported, there in list(zip(*(answer(rank) for rank in ranks), strict=True))[1:]:  # the first pass compiles
        assert len(reported) == len(there) == num_layers
        assert all(later > earlier - 1e-3 for later, earlier in zip(reported, there, strict=True)), (reported, there)
        assert reported[-1] - reported[0] > (num_layers - 2) * late_s, "they are told of one by one"


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_a_rank_is_an_error_within_five_seconds(number: signal.Signals, long: bool) -> None:
    """Also where passes have sums that wait for copies."""
    long_settings = LONG | {"enforce_eager": True, "enable_prefix_caching": False}
    settings = {"tensor_parallel_size": 2} | (long_settings if long else {})
    found = answer_of("engine_program", {"settings": settings, "signal": int(number), "long": long})
    assert "rank 1 of the tensor-parallel group" in found["reason"]
    assert found["took_s"] < 5.0


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5, 3.0])
def test_the_end_of_a_rank_that_starts_is_an_error(after_s: float) -> None:
    """Whatever this rank's kernels wait for, and whatever the driver waits for itself."""
    process = started("engine_program", json.dumps({"settings": {"tensor_parallel_size": 2, "enforce_eager": True}}))
    assert process.stderr is not None
    assert any("has its weights" in line for line in process.stderr)
    time.sleep(after_s)
    (rank,) = ranks_of(process)
    os.kill(rank, signal.SIGKILL)
    _, log = end_of(process, 20)
    assert process.returncode != 0
    assert "rank 1 of" in log
