"""Drafts that read hidden states on a GPU: the plain engine's text, and every token accepted where a draft is exact.

An exact draft is wrong as soon as one hidden state is stored, read or rotated at another place. Small cases run in
Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.stats import EngineStats
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.gpu.test_speculation import interpreted, interpreted_only
from tests.support.hidden_drafts import (
    eagle3_config,
    eagle3_tensors,
    save_eagle3,
    save_exact_eagle3,
    save_exact_mtp,
    save_mtp,
)
from tests.support.tiny_models import DEEPSEEK_V3, save_tiny_model

__all__ = ["interpreted"]  # a fixture of theirs

METHODS = pytest.mark.parametrize("method", ["mtp", "eagle3"])
# Widths of which the kernels for GPUs have tiles.
_LATENT: dict[str, Any] = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made, however long passes with them take."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])


def save_pair(folder: Path, method: str) -> tuple[Path, dict[str, Any]]:
    """A target with a random draft, and the options of that."""
    if method == "mtp":
        save_mtp(folder, "deepseek_v3", **DEEPSEEK_V3 | _LATENT)
        return folder, {"speculative_method": "mtp"}
    save_tiny_model(folder / "target", "qwen3", num_hidden_layers=7, head_dim=64)
    tensors = eagle3_tensors(64, 199, list(range(1, 199, 2)), layer="layers.0.")
    draft = save_eagle3(folder / "draft", eagle3_config(64, 199, 99, speculators=True), tensors)
    return folder / "target", {"speculative_model": str(draft)}


def save_exact(folder: Path, method: str) -> tuple[Path, dict[str, Any]]:
    """A target with a draft that is always right, and the options of that."""
    if method == "mtp":
        return save_exact_mtp(folder, **_LATENT), {"speculative_method": "mtp"}
    target, draft = save_exact_eagle3(folder)
    return target, {"speculative_model": str(draft)}


def run(folder: Path, requests: list[Request], **options: Any) -> tuple[list[list[int]], EngineStats]:
    runner = make_runner(make_settings(folder, **options))
    engine: Engine = make_engine(runner.settings, runner)
    return texts(engine, requests), engine.stats()


def cycle_requests(method: str, *lengths: int, tokens: int) -> list[Request]:
    """Prompts that the exact targets continue by the next token of their cycle."""
    first = 0 if method == "mtp" else 64
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [[first + (5 * index + place) % 64 for place in range(length)] for index, length in enumerate(lengths)]
    return [
        Request(request_id=str(index), prompt_token_ids=one, sampling=sampling) for index, one in enumerate(prompts)
    ]


def check_cycle(method: str, made: list[list[int]], requests: list[Request]) -> None:
    first = 0 if method == "mtp" else 64
    for text, request in zip(made, requests, strict=True):
        last = request.prompt_token_ids[-1] - first
        assert text == [first + (last + place) % 64 for place in range(1, len(text) + 1)]


# -- On a GPU


@METHODS
@pytest.mark.parametrize("step_depth", [0, 1])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_text_equals_the_plain_engines_when_a_draft_reads_hidden_states(
    tmp_path: Path, method: str, step_depth: int, enforce_eager: bool, gpu: None
) -> None:
    """Beside each other: all kinds of sampling, prompts of all lengths, prefix hits."""
    del gpu
    target, options = save_pair(tmp_path, method)
    requests = mixed_requests(24, 199, 90)
    plain, _ = run(target, requests)
    guessed, stats = run(
        target, requests, num_speculative_tokens=4, step_depth=step_depth, enforce_eager=enforce_eager, **options
    )
    assert guessed == plain
    assert stats.draft_tokens > 100


@METHODS
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_every_draft_token_is_accepted_when_the_draft_is_exact(
    tmp_path: Path, method: str, enforce_eager: bool, gpu: None
) -> None:
    """Through chunked prompts, prefix hits and batches."""
    del gpu
    target, options = save_exact(tmp_path, method)
    requests = cycle_requests(method, 9, 40, 150, 151, 300, tokens=1 + 4 * 20)
    small = {"max_num_batched_tokens": 64, "page_size": 16, "step_depth": 0, "enforce_eager": enforce_eager}
    made, stats = run(target, requests, num_speculative_tokens=3, **small, **options)
    check_cycle(method, made, requests)
    assert stats.draft_tokens > 150
    assert sum(stats.accepted_tokens_by_position) >= 0.97 * stats.draft_tokens, "the ends of texts"


@METHODS
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_every_draft_token_is_accepted_when_passes_without_guesses_come_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, gpu: None
) -> None:
    del gpu
    target, options = save_exact(tmp_path, method)
    turns = iter(range(1 << 20))
    monkeypatch.setattr(DraftController, "choose", lambda *_, **__: (3, 3, 0, 1, 0, 0, 3)[next(turns) % 7])
    requests = cycle_requests(method, 9, 40, 150, tokens=90)
    made, stats = run(target, requests, num_speculative_tokens=3, **options)
    check_cycle(method, made, requests)
    assert stats.draft_tokens > 100
    assert sum(stats.accepted_tokens_by_position) >= 0.9 * stats.draft_tokens, "the ends of texts"


# -- Without one


@interpreted_only
@pytest.mark.timeout(600)
@METHODS
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_in_small_every_draft_token_is_accepted_when_the_draft_is_exact(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, enforce_eager: bool
) -> None:
    """With passes without guesses between those with, and a prompt that is longer than a chunk."""
    target, options = save_exact(tmp_path, method)
    turns = iter(range(1 << 20))
    monkeypatch.setattr(DraftController, "choose", lambda *_, **__: (2, 2, 0, 1)[next(turns) % 4])
    requests = cycle_requests(method, 6, 18, tokens=14)
    made, stats = interpreted(
        target,
        requests,
        **options,
        num_speculative_tokens=2,
        enforce_eager=enforce_eager,
        long_prefill_token_threshold=16,
    )
    check_cycle(method, made, requests)
    assert stats.draft_tokens >= 6
    assert sum(stats.accepted_tokens_by_position) >= stats.draft_tokens - 3, "the ends of texts"
