"""Engines whose decodes select pages: in fp32 kernels and graphs make the text that plain torch makes on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.request import Request
from mini_infer_engine.runtime.attention.page_scores import key_bounds
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY
SELECTION = {"kv_selection": "quest", "kv_selection_budget": 64, "page_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(directory, "qwen3", head_dim=64, num_hidden_layers=4)
    return directory


def requests(name: str = "") -> list[Request]:
    return mixed_requests(24, 199, 300, name, outputs=(20, 60))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Of plain torch on the same device, each request alone."""
    settings = make_settings(folder, attention_backend="torch", enable_prefix_caching=False, step_depth=0, **SELECTION)
    runner = make_runner(settings)
    return [texts(make_engine(settings, runner), [request])[0] for request in requests()]


def test_selection_changes_texts_beyond_the_budget_alone(folder: Path, expected: list[list[int]]) -> None:
    settings = make_settings(folder, attention_backend="triton", page_size=16)
    exact = texts(make_engine(settings, make_runner(settings)), requests())
    within = [len(request.prompt_token_ids) + len(text) <= 64 for request, text in zip(requests(), exact, strict=True)]
    assert any(within)
    assert all(ours == theirs for ours, theirs, same in zip(exact, expected, within, strict=True) if same)
    assert exact != expected, "nothing was selected"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step_depth": 0},
        {"enforce_eager": True},
        {"long_prefill_token_threshold": 33},
        {"max_num_batched_tokens": 64},
        {"disable": ("separate_decode_graphs",)},
        {"disable": ("pdl",)},
        {"max_num_seqs": 3},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()) or "defaults",
)
def test_kernels_and_graphs_make_the_text_of_plain_torch(
    folder: Path, expected: list[list[int]], changes: dict[str, Any]
) -> None:
    settings = make_settings(folder, attention_backend="triton", enable_prefix_caching=False, **(SELECTION | changes))
    engine = make_engine(settings, make_runner(settings))
    made = texts(engine, requests())
    different = [index for index, pair in enumerate(zip(made, expected, strict=True)) if pair[0] != pair[1]]
    assert not different
    assert engine.scheduler.kv_cache.pool.usage == 0


@pytest.mark.parametrize(
    "common", [{"page_size": 16}, {"page_size": 32, "dtype": "bfloat16"}], ids=["fp32", "bf16, on Hopper its kernel"]
)
def test_the_text_is_that_without_selection_when_the_budget_covers_it(folder: Path, common: dict[str, Any]) -> None:
    made = []
    for selection in ({}, {"kv_selection": "quest", "kv_selection_budget": 512}):
        settings = make_settings(folder, attention_backend="triton", **common, **selection)
        made.append(texts(make_engine(settings, make_runner(settings)), requests()))
    assert made[1] == made[0]


def test_bounds_are_those_of_the_keys_when_pages_are_cached_after_hits_and_preemption(folder: Path) -> None:
    """Most were written by prompts, some by decodes."""
    page_bytes = 4 * 2 * 16 * 2 * 64 * 4 + 2 * 2 * 2 * 64 * 4  # keys and values of four layers, bounds of two
    settings = make_settings(folder, attention_backend="triton", kv_cache_memory=48 * page_bytes, **SELECTION)
    runner = make_runner(settings)
    assert runner.num_pages == 47, "the bounds are part of a page's bytes"
    engine = make_engine(settings, runner)
    for name in ("", "warm"):
        texts(engine, requests(name))
    stats = engine.stats()
    assert stats.cached_prompt_tokens > 0
    assert stats.preemptions > 0
    pool, cache = runner.pool, engine.scheduler.kv_cache.cache
    assert pool.bounds is not None
    cached = [page for page in range(runner.num_pages) if cache.knows(page)]
    assert len(cached) > 20
    for layer in (2, 3):
        assert torch.equal(pool.bounds.of_layer(layer)[cached], key_bounds(pool.pages[cached, layer, 0]))
