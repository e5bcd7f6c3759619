"""Whole engines on a CPU whose sequences lose cached tokens, and whose decodes select pages among those that remain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.layers.attention import Attention
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.runtime import memory_plan
from mini_infer_engine.runtime.attention import torch_selection
from mini_infer_engine.runtime.attention.selection_limits import check_selection
from mini_infer_engine.runtime.attention.torch_reference import GatheredDecodes
from mini_infer_engine.runtime.eviction.limits import eviction_obstacle
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from tests.engine.offline.test_llm_eviction import PROMPTS, check_engines, tokens
from tests.support.tiny_models import save_tiny_model, tiny_runner

Open = Callable[..., LLM]
POLICIES: tuple[dict[str, Any], ...] = tuple(
    {"kv_policy": name, "kv_budget": 90} for name in ("streaming-llm", "h2o", "snapkv", "snapkv-wide")
)
SELECTION: dict[str, Any] = {"kv_selection": "quest", "kv_selection_budget": 64}
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["kv_policy"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3", num_hidden_layers=4)
    return folder


@pytest.fixture(scope="module")
def open_llm(folder: Path) -> Open:
    shared: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 448, "max_num_seqs": 4}
    shared |= {"kv_cache_memory": 16_000_000, "kv_policy": "h2o", "kv_budget": 448, "page_size": 16, **SELECTION}
    return lambda **settings: LLM(str(folder), **{**shared, **settings})


def read_by_loops(cached: Tensor, queries: Tensor, num_tokens: int, budget_pages: int, scale: float) -> Tensor:
    """Returns what a decode of one KV head reads by Quest's definition: [group, head_dim].

    cached [pages, keys or values, page_size, head_dim] are its sequence's pages with `num_tokens`, queries [group,
    head_dim] its rotated queries.
    """
    size, newest = cached.shape[2], (num_tokens - 1) // cached.shape[2]
    scores = {}
    for page in range(1, newest - 1):
        keys = cached[page, 0]
        bounds = [torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum() for query in queries]
        scores[page] = float(max(bounds))
    best = sorted(scores, key=lambda page: -scores[page])[: budget_pages - 3]
    tokens = [
        page * size + place
        for page in sorted({0, *best, max(0, newest - 1), newest})
        for place in range(min(size, num_tokens - page * size))
    ]
    keys, values = (cached[:, half].flatten(0, 1)[tokens] for half in (0, 1))
    return (queries @ keys.T * scale).softmax(-1) @ values


@pytest.mark.parametrize("page_size", [16, 32])
@policies
def test_decodes_read_what_the_definition_selects_among_the_kept(
    policy: dict[str, Any], page_size: int, open_llm: Open
) -> None:
    """Policies that evict in decode compact a sequence several times."""
    policy = {**policy, "kv_budget": policy["kv_budget"] * page_size // 16}
    unread = []

    class Checked(torch_selection._SelectedDecodes):
        def __init__(self, pool: KVPool, bounds: KeyBounds, inputs: PassInputs, dense: GatheredDecodes) -> None:
            super().__init__(pool, bounds, inputs, dense)
            self.lengths = [length + 1 for length in inputs.starts[: self.count]]

        def attend(self, q: Tensor, kv: Tensor, layer: Attention) -> Tensor:
            mixed = super().attend(q, kv, layer)
            if self.bounds.of_layer(layer.layer) is None:
                return mixed
            budget = self.bounds.budget_pages
            queries = q[: self.count].reshape(self.count, layer.num_kv_heads, -1, layer.head_dim)
            of_heads = mixed.view(queries.shape)
            for row, length in enumerate(self.lengths):
                cached = self.pool.pages[self.tables[row], layer.layer]
                for head in range(layer.num_kv_heads):
                    expected = read_by_loops(cached[..., head, :], queries[row, head], length, budget, layer.scale)
                    torch.testing.assert_close(of_heads[row, head], expected, rtol=1e-4, atol=1e-5)
                unread.append((length - 1) // self.pool.spec.page_size + 1 - budget)
            return mixed

    llm = open_llm(page_size=page_size, kv_selection_budget=4 * page_size)
    with patch.object(torch_selection, "_SelectedDecodes", Checked):
        tokens(llm, [prompt * 2 for prompt in PROMPTS[:2]], max_tokens=70, **policy)
    assert len(unread) > 2 * 2 * 60
    assert max(unread) > 0, "all pages were read"


@policies
def test_texts_are_those_of_the_policy_alone_when_the_selection_covers_what_is_kept(
    policy: dict[str, Any], open_llm: Open
) -> None:
    alone = open_llm(kv_selection="none", kv_selection_budget=None)
    expected = tokens(alone, **policy)
    assert tokens(open_llm(kv_selection_budget=448), **policy) == expected
    selected = tokens(open_llm(), **policy)
    assert [text[0] for text in selected] == [text[0] for text in expected], "prompts attend to everything"
    assert selected != expected
    covering = open_llm(kv_selection_budget=448)
    assert tokens(covering, **{**policy, "kv_budget": 448}) == tokens(alone)


@policies
def test_texts_of_two_stages_do_not_depend_on_chunks_others_or_the_prefix_cache(
    policy: dict[str, Any], open_llm: Open
) -> None:
    expected = tokens(open_llm(enable_prefix_caching=False), **policy)
    check_engines(open_llm, policy, expected)


def test_another_prompt_is_exact_after_one_that_was_compacted_under_its_beginning(open_llm: Open) -> None:
    for memory in (16_000_000, 2_000_000):
        llm = open_llm(kv_cache_memory=memory)
        expected = tokens(open_llm(kv_cache_memory=memory, enable_prefix_caching=False))
        tokens(llm, **POLICIES[-1])
        assert tokens(llm) == expected, memory


@policies
def test_several_outputs_of_a_prompt_are_those_of_single_requests(policy: dict[str, Any], open_llm: Open) -> None:
    llm = open_llm()
    together = tokens(llm, PROMPTS[:1], n=3, seed=5, temperature=0.9, **policy)
    alone = [tokens(llm, PROMPTS[:1], seed=5 + index, temperature=0.9, **policy)[0] for index in range(3)]
    assert together == alone


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[3]], ids=lambda policy: policy["kv_policy"])
def test_texts_are_unchanged_when_compacted_sequences_are_swapped(
    policy: dict[str, Any], open_llm: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "_CPU_COPY_BYTES_PER_S", 1e12)  # a tiny model would compute its tokens anew
    prompts = [prompt[start:] for prompt in (PROMPTS[0], PROMPTS[2]) for start in range(6)]
    settings: dict[str, Any] = {"max_num_seqs": 12, "enable_prefix_caching": False, "kv_policy": "full"}
    settings |= {"kv_budget": None, "max_num_batched_tokens": 96}
    sampling: dict[str, Any] = {"max_tokens": 90, **policy, "kv_budget": 110}
    expected = tokens(open_llm(**settings), prompts, **sampling)
    llm = open_llm(**settings, kv_cache_memory=1_000_000, kv_swap_memory=100_000_000)
    assert tokens(llm, prompts, **sampling) == expected
    assert llm._engine.scheduler.kv_cache.num_swaps > 0


def test_two_stages_are_refused_by_name_on_a_gpu(folder: Path) -> None:
    runner = tiny_runner(folder)
    settings = EngineSettings(model=str(folder), kv_policy="snapkv-wide", kv_budget=90, **SELECTION)
    check_selection(settings, runner.config, "cpu", moves_kv=False)
    with pytest.raises(ModelError, match="--kv-policy snapkv-wide"):
        check_selection(settings, runner.config, "cuda", moves_kv=False)
    spec, layers = KVSpec(4, 16, 2, 24, torch.float32), runner.worker.model.attention_layers
    for device, is_refused in (("cpu", False), ("meta", True)):
        pool = KVPool(spec, 4, torch.device(device))
        pool.bounds = KeyBounds(spec, 4, 4, torch.device(device))
        obstacle = eviction_obstacle(runner.config, layers, pool, 128)
        assert (obstacle is not None and "--kv-selection" in obstacle) == is_refused
    params = SamplingParams(max_tokens=1, kv_policy="snapkv-wide", kv_budget=90)
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, kv_cache_memory=4_000_000, **SELECTION)
    llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
