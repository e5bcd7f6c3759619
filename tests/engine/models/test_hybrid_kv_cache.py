"""Models with sliding windows whose pages are freed behind them: the same text in less memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import BeamSearch, Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from tests.support.tiny_models import (
    GEMMA4_INPUTS,
    GEMMA4_MOE,
    GPT_OSS,
    GREEDY,
    PageDealer,
    reference_logits,
    save_tiny_model,
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma2": ("gemma2", {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 33}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gpt_oss": ("gpt_oss", {**GPT_OSS, "num_hidden_layers": 4}),
    "gemma4": ("gemma4_text", GEMMA4_INPUTS),
    "gemma4_moe": ("gemma4_text", GEMMA4_MOE | {"num_hidden_layers": 3, "layer_types": None}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
}
PROMPTS = [[(place * 7 + index * 3) % 190 + 5 for place in range(20 + 46 * index)] for index in range(3)]
LENGTH = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: (folder / name, save_tiny_model(folder / name, architecture, **changes))
        for name, (architecture, changes) in MODELS.items()
    }


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, models: dict[str, tuple[Path, Any]]) -> tuple[Path, Any]:
    """Full and windowed layers in several proportions, and windowed ones alone."""
    return models[request.param]


@pytest.fixture(params=["gemma3", "mistral"])
def folder(request: pytest.FixtureRequest, models: dict[str, tuple[Path, Any]]) -> Path:
    """Where it matters only whether all layers have a window."""
    return models[request.param][0]


def make_engine(directory: Path, **changes: Any) -> tuple[Engine, ModelRunner]:
    defaults = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 16, "max_num_batched_tokens": 30}
    settings = EngineSettings(model=str(directory), **(defaults | changes))
    runner = load_runner(settings)
    return Engine(settings, runner, (), runner.max_model_len, "revision"), runner


def generate(engine: Engine, prompts: Sequence[list[int]], **sampling: Any) -> list[list[int]]:
    """The tokens of each prompt, which run together."""
    made: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True} | sampling))
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params, noise_seed=index))
    while engine.has_work:
        for output in engine.step():
            made[output.request_id] += output.token_ids
            assert not output.error
    return list(made.values())


def test_text_is_that_of_transformers_when_pages_behind_windows_are_freed(model: tuple[Path, Any]) -> None:
    directory, reference = model
    expected = []
    for prompt in PROMPTS:
        options = {"do_sample": False, "max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "eos_token_id": None}
        expected.append(reference.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    engine, runner = make_engine(directory)
    assert not runner.kv_cache.is_uniform
    assert generate(engine, PROMPTS) == expected
    assert generate(engine, PROMPTS) == expected, "with prompts that are cached"
    assert engine.stats().cached_prompt_tokens > 50
    assert engine.scheduler.kv_cache.usage == 0


def test_text_is_that_of_a_large_pool_when_sequences_are_preempted(folder: Path) -> None:
    prompts = [[(place * 5 + index) % 190 + 5 for place in range(20)] for index in range(6)]
    roomy, runner = make_engine(folder, max_model_len=96)
    expected = generate(roomy, prompts, max_tokens=60)
    assert not roomy.stats().preemptions
    # Four fit with two pages in each group and a page each of headroom, and need three in a window's group later.
    num_pages = 11 * len(runner.kv_cache.groups)
    memory = (num_pages + 1) * runner.worker.page_bytes(16, runner.kv_cache)
    small, runner = make_engine(folder, max_model_len=96, kv_cache_memory=memory)
    assert runner.num_pages == num_pages
    assert generate(small, prompts, max_tokens=60) == expected
    assert small.stats().preemptions


@pytest.mark.parametrize("changes", [{"page_size": 32, "kv_cache_dtype": "int8"}, {"step_depth": 0}], ids=str)
def test_sampled_text_equals_the_uniform_layouts(folder: Path, changes: dict[str, Any]) -> None:
    uniform, runner = make_engine(folder, disable_hybrid_kv_cache_manager=True, **changes)
    assert runner.kv_cache.is_uniform
    hybrid, runner = make_engine(folder, **changes)
    assert not runner.kv_cache.is_uniform
    for round_ in ("computed", "cached"):
        expected = generate(uniform, PROMPTS, temperature=0.9, top_p=0.9)
        assert generate(hybrid, PROMPTS, temperature=0.9, top_p=0.9) == expected, round_


def test_text_is_that_without_guesses_when_tokens_are_guessed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    plain, _ = make_engine(folder, disable_hybrid_kv_cache_manager=True)
    guesses = {"speculative_method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    guessing, runner = make_engine(folder, max_num_batched_tokens=200, **guesses)
    assert not runner.kv_cache.is_uniform
    assert generate(guessing, PROMPTS) == generate(plain, PROMPTS)
    assert guessing.stats().draft_tokens > 20


def test_beams_equal_the_uniform_layouts(folder: Path) -> None:
    found = []
    for disabled in (True, False):
        engine, _ = make_engine(folder, disable_hybrid_kv_cache_manager=disabled)
        search = BeamSearch(request_ids=["a", "b", "c"], length_penalty=1.0, early_stopping=False)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add(Request(request_id="a", prompt_token_ids=PROMPTS[1], sampling=params, beam_search=search))
        made: dict[str, list[int]] = {}
        while engine.has_work:
            made |= {output.request_id: output.token_ids for output in engine.step()}
        assert engine.scheduler.kv_cache.usage == 0
        found.append(made)
    assert set(found[0]) == {"a", "b", "c"}
    assert found[0] == found[1]


def test_logits_are_those_of_transformers_when_pages_behind_the_window_are_null(model: tuple[Path, Any]) -> None:
    _, runner = make_engine(model[0])
    tokens = [(place * 37 + 11) % 190 + 5 for place in range(90)]
    dealer = PageDealer(runner)
    groups = runner.kv_cache.groups
    tables = [dealer.table(len(tokens)) for _ in groups]
    parts, start = [], 0
    for size in (25, 1, 1, 30, 7, 1, 1, 1, 23):
        for group, table in zip(groups, tables, strict=True):
            num_freed = group.num_skipped_tokens(start) // runner.page_size
            table[:num_freed] = [runner.num_pages] * num_freed
        row = Row(0, start, size, tokens[start : start + size], tables[0], GREEDY if size == 1 else None)
        row.more_page_tables = tables[1:]
        parts.append(runner.logits(Batch([row], int(size == 1))))
        start += size
    torch.testing.assert_close(torch.cat(parts), reference_logits(model[1], tokens), atol=1e-4, rtol=1e-4)


def most_used_and_running(directory: Path, prompts: Sequence[list[int]], **changes: Any) -> tuple[float, int]:
    """The largest share of the pool in use, and the most sequences that ran at once."""
    engine, _ = make_engine(directory, enable_prefix_caching=False, **changes)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    most_used, most_running = 0.0, 0
    while engine.has_work:
        engine.step()
        most_used = max(most_used, engine.scheduler.kv_cache.usage)
        most_running = max(most_running, len(engine.scheduler.running))
    return most_used, most_running


def test_long_sequences_take_less_memory_and_more_of_them_fit_when_windows_are_freed(
    models: dict[str, tuple[Path, Any]],
) -> None:
    """Of four layers, three have a window of 20 tokens: at 440 tokens each they retain a tenth at most."""
    directory, _ = models["gemma3"]
    long_prompts = [[(place + index) % 190 + 5 for place in range(400)] for index in range(6)]
    uniform, hybrid = (
        most_used_and_running(directory, long_prompts[:1], disable_hybrid_kv_cache_manager=disabled)
        for disabled in (True, False)
    )
    assert hybrid[0] < uniform[0] / 2
    memory = {"kv_cache_memory": 1_000_000, "max_model_len": 480, "max_num_batched_tokens": 200}
    uniform, hybrid = (
        most_used_and_running(directory, long_prompts, disable_hybrid_kv_cache_manager=disabled, **memory)
        for disabled in (True, False)
    )
    assert hybrid[1] >= 2 * uniform[1] >= 2
