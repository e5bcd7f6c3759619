"""Models with sliding windows on a GPU: the text of the uniform layout, while pages behind windows are freed.

Freed pages are filled with large numbers in some tests, so that attention that reads one makes another text.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import BeamSearch, Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY
LONGEST = 900
POISON = 200.0

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "sliding_window": 150,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma2": ("gemma2", {"head_dim": 64, "sliding_window": 40}),
    "mistral": ("mistral", {"head_dim": 64, "sliding_window": 70}),
}


def save(folder: Path, name: str) -> None:
    architecture, changes = MODELS[name]
    save_tiny_model(folder, architecture, max_position_embeddings=2 * LONGEST, **changes)


def start(folder: Path, *, uniform: bool = False, **changes: Any) -> tuple[Engine, ModelRunner]:
    """An engine whose prompts are computed in chunks."""
    limits = {"max_model_len": LONGEST + 100, "max_num_batched_tokens": 400}
    settings = make_settings(folder, **(limits | changes), disable_hybrid_kv_cache_manager=uniform)
    runner = make_runner(settings)
    assert runner.kv_cache.is_uniform == uniform
    return make_engine(runner.settings, runner), runner


def poison_free_pages(engine: Engine, runner: ModelRunner) -> None:
    """Fills all pages that no sequence uses. Passes in flight run before, and those to come read none of them."""
    free = [page for page, count in enumerate(engine.scheduler.kv_cache.pool.references) if not count]
    runner.pool.pages[free] = POISON


def texts_over_poison(engine: Engine, runner: ModelRunner, requests: list[Request]) -> list[list[int]]:
    made: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        poison_free_pages(engine, runner)
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            made[output.request_id] += output.token_ids
    return list(made.values())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"dtype": "bfloat16"}),  # decode attention of Hopper GPUs, where there is one
        ("gemma2", {"page_size": 16}),
        ("mistral", {"page_size": 16, "enforce_eager": True}),
        ("mistral", {"page_size": 64, "kv_cache_dtype": "int8"}),
    ],
    ids=str,
)
def test_text_is_that_of_the_uniform_layout_when_pages_behind_windows_are_freed(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    """All kinds of sampling beside each other, prompts in chunks, from the cache, and in captured passes."""
    save(tmp_path, name)
    requests, again = (mixed_requests(14, 199, LONGEST, name=name) for name in ("first ", "second "))
    uniform, _ = start(tmp_path, uniform=True, **changes)
    expected = texts(uniform, requests)
    engine, _ = start(tmp_path, **changes)
    assert texts(engine, requests) == expected
    assert texts(engine, again) == texts(uniform, again)
    assert engine.stats().cached_prompt_tokens > 1000
    assert engine.scheduler.kv_cache.usage == 0


@pytest.mark.parametrize(
    ("name", "changes"), [("gemma3", {}), ("gemma3", {"dtype": "bfloat16"}), ("mistral", {"page_size": 16})], ids=str
)
def test_text_is_unchanged_when_freed_pages_are_overwritten(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    save(tmp_path, name)
    engine, runner = start(tmp_path, enable_prefix_caching=False, **changes)
    requests = mixed_requests(10, 199, LONGEST, outputs=(30, 90))
    expected = texts(engine, requests)
    assert texts_over_poison(engine, runner, requests) == expected


def test_text_is_that_of_a_large_pool_when_sequences_are_preempted(tmp_path: Path) -> None:
    save(tmp_path, "gemma3")
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    requests = [
        Request(request_id=str(index), prompt_token_ids=[(place * 5 + index) % 190 + 5 for place in range(60)],
                sampling=params)
        for index in range(8)
    ]  # fmt: skip
    changes = {"page_size": 16, "max_model_len": 160, "enable_prefix_caching": False}
    roomy, runner = start(tmp_path, **changes)
    expected = texts(roomy, requests)
    assert not roomy.stats().preemptions
    num_pages = 24 * len(runner.kv_cache.groups)
    memory = (num_pages + 1) * runner.worker.page_bytes(16, runner.kv_cache)
    small, runner = start(tmp_path, **changes, kv_cache_memory=memory)
    assert runner.num_pages == num_pages
    assert texts_over_poison(small, runner, requests) == expected
    assert small.stats().preemptions


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])


@pytest.mark.usefixtures("always_drafts")
def test_text_is_that_without_guesses_when_tokens_are_guessed(tmp_path: Path) -> None:
    save(tmp_path, "gemma3")
    requests = mixed_requests(12, 199, 400)
    plain, _ = start(tmp_path, uniform=True, page_size=16)
    guesses = {"speculative_method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    engine, _ = start(tmp_path, page_size=16, **guesses)
    assert texts(engine, requests) == texts(plain, requests)
    assert engine.stats().draft_tokens > 100


def test_beams_are_those_of_the_uniform_layout(tmp_path: Path) -> None:
    save(tmp_path, "gemma2")
    found = []
    for uniform in (True, False):
        engine, _ = start(tmp_path, uniform=uniform, page_size=16)
        search = BeamSearch(request_ids=["a", "b", "c"], length_penalty=1.0, early_stopping=False)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        prompt = [(place * 7) % 190 + 5 for place in range(120)]
        engine.add(Request(request_id="a", prompt_token_ids=prompt, sampling=params, beam_search=search))
        made: dict[str, list[int]] = {}
        while engine.has_work:
            made |= {output.request_id: output.token_ids for output in engine.step()}
        found.append(made)
    assert set(found[0]) == {"a", "b", "c"}
    assert found[0] == found[1]


def test_a_long_sequence_takes_less_memory_when_pages_behind_windows_are_freed(tmp_path: Path) -> None:
    """Of four layers, three have a window of 150 tokens: at 960 tokens they retain a fifth."""
    save(tmp_path, "gemma3")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    shares, running = [], []
    for uniform in (True, False):
        engine, runner = start(tmp_path, uniform=uniform, page_size=16, enforce_eager=True, max_num_batched_tokens=100)
        engine.add(Request(request_id="0", prompt_token_ids=[7] * LONGEST, sampling=params))
        most = last = 0.0
        while engine.has_work:
            engine.step()
            most, last = max(most, engine.scheduler.kv_cache.usage), engine.scheduler.kv_cache.usage or last
        memory = runner.memory.bytes_by_tag()
        assert memory["kv_cache"] == runner.pool.storage.nbytes
        shares.append((most, last))
        running.append(runner.num_pages * runner.pool.spec.page_bytes)
    assert abs(running[0] / running[1] - 1) < 0.01, "both pools have the same memory"
    assert shares[1][0] < 0.55 * shares[0][0]
    assert shares[1][1] < 0.45 * shares[0][1]
