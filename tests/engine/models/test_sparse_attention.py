"""Sparse attention of DeepSeek-V3.2 and GLM-5: what is cached, whole engines on it, and what it does not go with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.models.deepseek_v32 import SparseLatentConfig
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.attention import torch_sparse_latent
from mini_infer_engine.runtime.attention.sparse_limits import check_sparse_attention
from tests.support.tiny_models import (
    DEEPSEEK_V32,
    PageDealer,
    reference_logits,
    run_chunks,
    save_tiny_model,
    tiny_runner,
)

PROMPTS = [[(place * 7 + shift * 13) % 190 + 5 for place in range(3 + 19 * shift)] for shift in range(5)]
"""From fewer tokens than are chosen to many more."""
LENGTH = 24


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("v32")
    return folder, save_tiny_model(folder, "deepseek_v32", **DEEPSEEK_V32)


@pytest.fixture(scope="module")
def folder(saved: tuple[Path, Any]) -> Path:
    return saved[0]


def generate(folder: Path, **settings: Any) -> tuple[LLM, list[list[int]]]:
    common = {"device": "cpu", "max_model_len": 160, "max_num_seqs": 6, "skip_tokenizer_init": True}
    llm = LLM(str(folder), **(common | {"kv_cache_memory": 4_000_000} | settings))
    return llm, outputs_of(llm)[0]


def outputs_of(llm: LLM) -> tuple[list[list[int]], int]:
    """The tokens of all prompts, and how many of these were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], sum(each.num_cached_tokens for each in outputs)


def test_text_is_that_of_transformers_when_chunked_cached_preempted_and_swapped(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    expected = []
    for prompt in PROMPTS:
        inputs = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "eos_token_id": None}
        made = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        expected.append(made[0, len(prompt) :].tolist())
    llm, made = generate(folder)
    assert made == expected
    again, num_cached = outputs_of(llm)
    assert again == expected, "cached"
    assert num_cached > 100
    assert generate(folder, max_num_batched_tokens=32)[1] == expected, "chunked"
    page_bytes = 3 * 16 * (32 + 16 + 24) * 4
    for swap_memory in (0, 10_000_000):
        settings = {"kv_cache_memory": 15 * page_bytes, "kv_swap_memory": swap_memory, "enable_prefix_caching": False}
        llm, made = generate(folder, **settings)
        assert made == expected, f"preempted, with {swap_memory} bytes for swapped pages"
        scheduler = llm._engine.scheduler
        assert scheduler.num_preemptions > 0
        assert (scheduler.kv_cache.num_swaps > 0) == (swap_memory > 0)


def test_a_token_is_cached_as_latent_rope_key_and_key_of_the_indexer(folder: Path) -> None:
    runner = tiny_runner(folder)
    assert runner.pool.pages.shape[1:] == (3, 1, 16, 1, 32 + 16 + 24)


def test_logits_are_unchanged_when_few_scores_are_computed_at_a_time(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sparse_latent, "_MOST_SCORES", 5000)
    runner = tiny_runner(saved[0])
    actual = run_chunks(runner, PROMPTS[4], PageDealer(runner).table(len(PROMPTS[4])), [50, len(PROMPTS[4]) - 50])
    assert (actual - reference_logits(saved[1], PROMPTS[4])).abs().max() <= 1e-4


def test_text_is_that_without_guesses_when_tokens_are_guessed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    guesses = {"speculative_method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    assert generate(folder, **guesses)[1] == generate(folder)[1]


@pytest.mark.parametrize(
    ("options", "named"),
    [({}, "--enforce-eager"), ({"enforce_eager": True, "speculative_method": "ngram"}, "speculative_method")],
)
def test_an_option_is_refused_by_name_when_a_gpu_cannot_run_it_yet(
    options: dict[str, Any], named: str, folder: Path
) -> None:
    config = read_config(folder)
    with pytest.raises(ModelError, match=named):
        check_sparse_attention(EngineSettings(model="any", **options), config, "cuda", moves_kv=False)
    for allowed in ({"enforce_eager": True}, {"attention_backend": "torch"}):
        check_sparse_attention(EngineSettings(model="any", **allowed), config, "cuda", moves_kv=False)
    check_sparse_attention(EngineSettings(model="any", **options), config, "cpu", moves_kv=False)


def config_of(folder: Path, target: Path, architecture: str, **changes: Any) -> SparseLatentConfig:
    values = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]} | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    config = read_config(target)
    assert isinstance(config, SparseLatentConfig)
    return config


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        ({}, {0, 1, 2}),
        ({"index_topk_pattern": "FSF"}, {0, 2}),
        ({"indexer_types": ["full", "shared", "shared"]}, {0}),
        ({"num_hidden_layers": 8, "mlp_layer_types": None, "index_topk_freq": 3}, {0, 1, 4, 7}),
    ],
)
def test_layers_without_an_indexer_follow_the_config(
    changes: dict[str, Any], indexed: set[int], folder: Path, tmp_path: Path
) -> None:
    assert config_of(folder, tmp_path, "GlmMoeDsaForCausalLM", **changes).indexed_layers == indexed


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "q_lora_rank"),
        ("DeepseekV32ForCausalLM", {"rope_interleave": False}, "rope_interleave"),
        ("DeepseekV32ForCausalLM", {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        ("DeepseekV32ForCausalLM", {"index_head_dim": 8}, "index_head_dim"),
        ("DeepseekV32ForCausalLM", {"index_topk": 0}, "index_topk"),
        ("DeepseekV32ForCausalLM", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "FXF"}, "index_topk_pattern"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": 3}, "index_topk_pattern"),
    ],
)
def test_a_config_is_refused_by_name_when_it_asks_for_another_computation(
    architecture: str, changes: dict[str, Any], named: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        config_of(folder, tmp_path, architecture, **changes)
