"""Texts of sequences that lose cached tokens, on random models: they depend on the request alone, and are those of
transformers with a cache from which the same tokens are taken.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.speculation.controller import DraftController
from tests.support.tiny_models import DEEPSEEK, save_tiny_model

PROMPTS = [[random.Random(length).randrange(3, 199) for _ in range(length)] for length in (170, 141, 66)]
POLICIES: tuple[dict[str, Any], ...] = (
    {"kv_policy": "streaming-llm", "kv_budget": 50},
    {"kv_policy": "h2o", "kv_budget": 50},
    {"kv_policy": "snapkv", "kv_budget": 90},
    {"kv_policy": "snapkv-wide", "kv_budget": 90},
)
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["kv_policy"])
Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def open_llm(folder: Path) -> Open:
    shared: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 384, "max_num_seqs": 4}
    shared |= {"kv_cache_memory": 16_000_000, "kv_policy": "h2o", "kv_budget": 384}  # without it no request has h2o
    return lambda **settings: LLM(str(folder), **{**shared, **settings})


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> list[list[int]]:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    if "kv_budget" not in sampling and "kv_policy" not in sampling:
        defaults["kv_policy"] = "full"
    params = SamplingParams(**{**defaults, **sampling})
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def check_engines(open_llm: Open, policy: dict[str, Any], expected: list[list[int]], **more: dict[str, Any]) -> None:
    """Checks that engines that plan otherwise make the same texts, with a cached prefix too; `more` are others."""
    engines: dict[str, dict[str, Any]] = {
        "chunks": {"max_num_batched_tokens": 83},
        "no steps ahead": {"step_depth": 0},
        "one at a time": {"max_num_seqs": 1},
        "server's default": policy,
        **more,
    }
    for name, settings in engines.items():
        sampling = dict.fromkeys(policy) if name == "server's default" else policy
        llm = open_llm(**settings)
        assert tokens(llm, **sampling) == expected, name
        assert tokens(llm, **sampling) == expected, f"{name}, with a cached prefix"


@pytest.fixture(scope="module")
def full(open_llm: Open) -> list[list[int]]:
    return tokens(open_llm())


@policies
def test_texts_are_those_of_a_full_cache_when_the_budget_is_not_exceeded(
    policy: dict[str, Any], full: list[list[int]], open_llm: Open
) -> None:
    assert tokens(open_llm(), **{**policy, "kv_budget": 384}) == full


@policies
def test_texts_do_not_depend_on_chunks_pages_preemption_or_the_prefix_cache(
    policy: dict[str, Any], full: list[list[int]], open_llm: Open
) -> None:
    expected = tokens(open_llm(enable_prefix_caching=False), **policy)
    assert expected != full
    check_engines(open_llm, policy, expected, pages={"page_size": 48})


@policies
@pytest.mark.parametrize("swap_memory", [0, 100_000_000])
def test_texts_are_unchanged_when_sequences_with_budgets_are_preempted(
    policy: dict[str, Any], swap_memory: int, open_llm: Open
) -> None:
    prompts = [prompt[start:] for prompt in (PROMPTS[0], PROMPTS[2]) for start in range(6)]
    settings: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "enable_prefix_caching": False}
    sampling: dict[str, Any] = {"max_tokens": 90, **policy, "kv_budget": 110}
    expected = tokens(open_llm(**settings), prompts, **sampling)
    llm = open_llm(**settings, kv_cache_memory=1_000_000, kv_swap_memory=swap_memory)
    assert tokens(llm, prompts, **sampling) == expected
    scheduler = llm._engine.scheduler
    assert scheduler.num_preemptions > 0
    assert (scheduler.kv_cache.num_swaps > 0) == (swap_memory > 0 and policy["kv_policy"] != "h2o")


@policies
def test_texts_are_unchanged_when_the_engine_speculates_for_others(policy: dict[str, Any], open_llm: Open) -> None:
    prompts, repeated = PROMPTS[:2], [7, 8, 9, 10] * 20
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    params = [SamplingParams(**settings, **policy)] * 2 + [SamplingParams(**settings, kv_policy="full")]

    def made(llm: LLM) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in (*prompts, repeated)]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    guessing = open_llm(speculative_method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    with patch.object(DraftController, "choose", lambda self, *_, **__: self.levels[-1]):
        assert made(guessing) == made(open_llm())
    assert guessing._engine.stats().draft_tokens > 0  # type: ignore[union-attr]  # it is one engine


@policies
def test_another_prompt_with_the_same_beginning_is_exact_after_one_that_was_compacted(
    policy: dict[str, Any], full: list[list[int]], open_llm: Open
) -> None:
    for memory in (16_000_000, 1_500_000):
        llm = open_llm(kv_cache_memory=memory)
        assert tokens(llm, **policy) != full
        assert tokens(llm) == full
        assert memory < 10_000_000 or llm._engine.stats().cached_prompt_tokens >= 3 * 48


@policies
def test_several_outputs_of_a_prompt_are_those_of_single_requests(policy: dict[str, Any], open_llm: Open) -> None:
    llm = open_llm()
    together = tokens(llm, PROMPTS[:1], n=3, seed=5, temperature=0.9, **policy)
    alone = [tokens(llm, PROMPTS[:1], seed=5 + index, temperature=0.9, **policy)[0] for index in range(3)]
    assert together == alone
    assert len({*map(tuple, together)}) > 1


def test_texts_with_penalties_go_on_after_a_compaction(open_llm: Open) -> None:
    sampling = {"kv_policy": "streaming-llm", "kv_budget": 50, "repetition_penalty": 1.2, "frequency_penalty": 0.5}
    made = tokens(open_llm(), **sampling)
    assert tokens(open_llm(max_num_batched_tokens=90, page_size=32), **sampling) == made


def test_the_pool_holds_more_sequences_when_prompts_are_compacted(open_llm: Open) -> None:
    llm = open_llm(kv_cache_memory=1_500_000, max_num_seqs=16, enable_prefix_caching=False)
    scheduler, most = llm._engine.scheduler, {}
    for policy in ({}, {"kv_policy": "snapkv", "kv_budget": 66}):
        engine, running = llm._engine, []
        prompts = [PROMPTS[0][start:] for start in range(12)]
        step = engine.step

        def counted(step: Any = step, running: list[int] = running) -> Any:
            outputs = step()
            running.append(len(scheduler.running))
            return outputs

        engine.step = counted  # type: ignore[method-assign]
        tokens(llm, prompts, max_tokens=40, **policy)
        engine.step = step  # type: ignore[method-assign]
        most[len(policy)] = max(running)
    assert most[2] >= 2 * most[0]


def test_requests_are_refused_by_name_when_a_policy_cannot_serve_them(open_llm: Open) -> None:
    llm = open_llm(max_num_batched_tokens=70, kv_policy="full", kv_budget=None)
    for sampling, match in (
        ({"kv_policy": "snapkv", "kv_budget": 90}, "--max-num-batched-tokens"),
        ({"kv_policy": "snapkv"}, "kv_budget"),
        ({"kv_policy": "h2o", "kv_budget": 90}, "kv_policy"),
        ({"kv_budget": 90}, "kv_budget"),
        ({"kv_policy": "streaming-llm", "kv_budget": 0}, "kv_budget"),
    ):
        with pytest.raises(ValueError, match=match):
            tokens(llm, **sampling)


@pytest.mark.parametrize(
    ("architecture", "changes"), [("mistral", {"sliding_window": 64}), ("deepseek_v2", DEEPSEEK), ("gpt_oss", {})]
)
def test_an_engine_is_refused_when_its_model_evicts_no_tokens(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": 4_000_000}
    with pytest.raises(ModelError, match="--kv-policy snapkv"):
        LLM(str(tmp_path), **settings, kv_policy="snapkv", kv_budget=90)
    llm = LLM(str(tmp_path), **settings)
    with pytest.raises(ValueError, match="kv_policy 'snapkv'"):
        tokens(llm, kv_policy="snapkv", kv_budget=90)


def kept_by(policy: str, budget: int, attentions: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Returns the indexes that a policy keeps of a prompt [kv_heads, budget], by attentions [heads, keys, keys]."""
    num_keys = attentions.shape[-1]
    if policy == "streaming-llm":
        return torch.tensor([*range(4), *range(num_keys - budget + 4, num_keys)]).expand(kv_heads, -1)
    if policy == "h2o":
        means = attentions.sum(1) / torch.arange(num_keys, 0, -1)
        return means.view(kv_heads, -1, num_keys).mean(1).topk(budget).indices.sort().values
    votes = attentions[:, -64:, :-64].mean(1)
    kernel = 5 if policy == "snapkv" else min(63, (num_keys - 64) // 4 | 1)
    votes = torch.nn.functional.avg_pool1d(votes, kernel, 1, kernel // 2).view(kv_heads, -1, num_keys - 64).mean(1)
    chosen = votes.topk(budget - 64).indices.sort().values
    return torch.cat((chosen, torch.arange(num_keys - 64, num_keys).expand(kv_heads, -1)), dim=1)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@policies
def test_texts_are_those_of_transformers_with_the_same_tokens_in_its_cache(
    policy: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, architecture)
    model.set_attn_implementation("eager")
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": 4_000_000}
    llm = LLM(str(tmp_path), **settings, max_model_len=300, **policy)
    name, budget, count = policy["kv_policy"], policy["kv_budget"], 15  # before they evict again
    made = tokens(llm, PROMPTS[:2], max_tokens=count, **policy)
    for prompt, its_tokens in zip(PROMPTS[:2], made, strict=True):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            output = model(torch.tensor([prompt]), past_key_values=cache, output_attentions=True)
            for layer, attentions in zip(cache.layers, output.attentions, strict=True):
                kept = kept_by(name, budget, attentions[0], layer.keys.shape[1])[None, :, :, None]
                layer.keys = layer.keys.gather(2, kept.expand(-1, -1, -1, layer.keys.shape[-1]))
                layer.values = layer.values.gather(2, kept.expand(-1, -1, -1, layer.values.shape[-1]))
            expected = [int(output.logits[0, -1].argmax())]
            for position in range(len(prompt), len(prompt) + count - 1):
                ids, places = torch.tensor([expected[-1:]]), torch.tensor([[position]])
                output = model(ids, past_key_values=cache, position_ids=places)
                expected.append(int(output.logits[0, -1].argmax()))
        assert its_tokens == expected
