"""Speculation over recurrent states on a GPU: the plain engine's text, whole, and in small by Triton's interpreter.

A state that is not brought back behind a rejected token, or brought back from a wrong slot, changes the text.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.stats import EngineStats
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import mixed_requests
from tests.gpu.test_speculation import NGRAM, always, interpreted, interpreted_only, run
from tests.support.hidden_drafts import save_mtp
from tests.support.tiny_models import GATED_DELTA, GATED_MOE, LFM2, MAMBA, NEMOTRON, save_tiny_model

__all__ = ["always", "interpreted"]  # fixtures of theirs

QWEN: dict[str, Any] = GATED_DELTA | GATED_MOE | {"full_attention_interval": 2, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", QWEN),
    "granite-hybrid": ("granitemoehybrid", MAMBA | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "nemotron-h": ("nemotron_h", NEMOTRON | {"head_dim": 16}),
    "lfm2": ("lfm2", LFM2),
}
PREDICTED: dict[str, Any] = {"speculative_method": "mtp"}


def save(folder: Path, kind: str) -> dict[str, Any]:
    """Saves a model, and returns the options of its speculation: by look-up, or by its own layer for "mtp"."""
    if kind == "mtp":
        save_mtp(folder, "qwen3_next", **GATED_DELTA | GATED_MOE | {"num_hidden_layers": 4})
        return PREDICTED
    architecture, changes = MODELS[kind]
    save_tiny_model(folder, architecture, **changes)
    return NGRAM


@pytest.mark.parametrize("kind", [*MODELS, "mtp"])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_text_equals_the_plain_engines_when_guesses_are_rejected(
    tmp_path: Path, kind: str, enforce_eager: bool, gpu: None
) -> None:
    del gpu
    options = save(tmp_path, kind)
    requests = mixed_requests(24, 190, 60)
    plain, _ = run(tmp_path, requests)
    guessed, stats = run(tmp_path, requests, num_speculative_tokens=3, enforce_eager=enforce_eager, **options)
    assert guessed == plain
    assert stats.draft_tokens > 50
    assert sum(stats.accepted_tokens_by_position) < stats.draft_tokens


@pytest.mark.parametrize("kind", ["qwen3-next", "mtp"])
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_text_equals_the_plain_engines_when_sequences_are_preempted(tmp_path: Path, kind: str, gpu: None) -> None:
    del gpu
    options = save(tmp_path, kind)
    requests = mixed_requests(24, 190, 60)
    small: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "page_size": 16, "max_model_len": 192}
    small["kv_cache_memory"] = 8_000_000
    plain, _ = run(tmp_path, requests, **small)  # chunks of other sizes round differently, and a hot row may follow
    guessed, stats = run(tmp_path, requests, **small, **options, num_speculative_tokens=3)
    assert guessed == plain
    assert stats.draft_tokens > 50


@interpreted_only
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "enforce_eager"),
    [("qwen3-next", False), ("qwen3-next", True), ("granite-hybrid", False), ("lfm2", False), ("mtp", False)],
)
def test_in_small_text_equals_the_plain_engines_when_guesses_are_rejected(
    interpreted: Callable[..., tuple[list[list[int]], EngineStats]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    enforce_eager: bool,
) -> None:
    """Passes without guesses come between those with guesses."""
    options = save(tmp_path, kind)
    turns = iter(range(1 << 20))
    monkeypatch.setattr(DraftController, "choose", lambda *_, **__: (2, 0, 1, 2)[next(turns) % 4])
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[9, 8, 7, 9, 8][: 3 + index],
            sampling=SamplingParams(temperature=0.8 * index, top_k=20, max_tokens=7, ignore_eos=True),
            noise_seed=index,
        )
        for index in range(2)
    ]
    plain, _ = interpreted(tmp_path, requests)
    guessed, stats = interpreted(tmp_path, requests, num_speculative_tokens=2, enforce_eager=enforce_eager, **options)
    assert guessed == plain
    assert stats.draft_tokens >= 2
    assert sum(stats.accepted_tokens_by_position) < stats.draft_tokens
