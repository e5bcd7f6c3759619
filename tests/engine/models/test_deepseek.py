"""What DeepSeek's decoders have of their own: the router's rules, the size of what is cached, whole engines on it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_contract.events import BlockStored, wire_hash
from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.registry import model_class, read_config
from mini_infer_engine.models.sparse_decoder import SparseConfig
from mini_infer_engine.ops.torch_ops import route
from tests.support.tiny_models import DEEPSEEK, DEEPSEEK_V3, DEEPSEEK_YARN, GREEDY, save_tiny_model, tiny_runner


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_token_is_cached_as_one_latent_and_its_rope_key(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK)
    runner = tiny_runner(tmp_path)
    spec = runner.pool.spec
    assert runner.pool.pages.shape[1:] == (3, 1, 16, 1, 32 + 16)
    assert spec.page_bytes == 3 * 16 * 48 * 4
    assert runner.pool.pages[0].nbytes == spec.page_bytes


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_normalised_router_weights_sum_to_the_scale(scoring: Any) -> None:
    spec = MoESpec(8, 8, 6, 3, normalizes_top_k=True, num_shared=2, scoring=scoring, scale=2.5)
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    weights, experts = route(logits, spec)
    assert torch.allclose(weights[:, :3].sum(-1), torch.tensor(2.5))
    assert (weights[:, 3:] == 1).all()
    assert experts[:, 3:].tolist() == [[6, 7]] * 20


def test_router_correction_affects_selection_but_not_weights() -> None:
    spec = MoESpec(8, 8, 4, 1, normalizes_top_k=False, scoring="sigmoid", has_correction=True)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, experts = route(logits, spec, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert experts.tolist() == [[3]]
    assert torch.allclose(weights, torch.tensor([[-1.0]]).sigmoid())


def test_experts_are_selected_from_the_best_groups() -> None:
    """By softmax a group is as good as its best expert, by sigmoid as its two best together."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0, 1.0, 1.0]])
    sampling_params: dict[str, Any] = {"normalizes_top_k": False, "num_groups": 3, "top_groups": 1}
    assert sorted(route(logits, MoESpec(8, 8, 6, 2, **sampling_params))[1][0].tolist()) == [0, 1]
    assert sorted(route(logits, MoESpec(8, 8, 6, 2, scoring="sigmoid", **sampling_params))[1][0].tolist()) == [2, 3]


def test_moe_layers_follow_frequency_and_first_dense_layers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK)
    edit_config(tmp_path, num_hidden_layers=8, first_k_dense_replace=3, moe_layer_freq=2)
    config = read_config(tmp_path)
    assert isinstance(config, SparseConfig)
    assert config.sparse_layers == {4, 6}


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_group": 5, "topk_method": "group_limited_greedy"}, "n_group"),
        ({"n_group": 2, "topk_group": 3, "topk_method": "group_limited_greedy"}, "topk_group"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"head_dim": 20}, "head_dim"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ],
)
def test_an_unsupported_deepseek_config_is_refused_by_name(
    changes: dict[str, Any], message_part: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message_part):
        read_config(tmp_path)


def test_multi_token_prediction_layers_are_ignored(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", **DEEPSEEK_V3)
    with torch.device("meta"):
        model = model_class("DeepseekV3ForCausalLM")(read_config(tmp_path))
    assert model.is_unused("model.layers.3.eh_proj.weight")
    assert not model.is_unused("model.layers.2.eh_proj.weight")


def test_kv_events_are_emitted_for_latent_blocks(tmp_path: Path) -> None:
    """As of any model: each full block once, by the keys of its tokens, and nothing when it is found again."""
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK_YARN)
    runner = tiny_runner(tmp_path)
    engine = Engine(runner.settings, runner, (2,), runner.max_model_len, "revision")
    messages = []
    for attempt in range(2):
        engine.add(Request(request_id=str(attempt), prompt_token_ids=PROMPTS[0], sampling=GREEDY, noise_seed=0))
        while engine.has_work:
            engine.step()
        messages.append([event for event in engine.take_events() if isinstance(event, BlockStored)])
    keys = [wire_hash(key) for key in block_keys(PROMPTS[0], root_key("revision"))]
    assert [key for event in messages[0] for key in event.block_hashes][:3] == keys[:3]
    assert [token for event in messages[0] for token in event.token_ids][:48] == PROMPTS[0][:48]
    assert not {key for event in messages[1] for key in event.block_hashes} & set(keys)


PROMPTS = [[(place * 7 + shift * 13) % 190 + 5 for place in range(60 + 9 * shift)] for shift in range(6)]


def generate(folder: Path, **settings: Any) -> tuple[LLM, list[list[int]]]:
    common = {"device": "cpu", "max_model_len": 160, "max_num_seqs": 6, "skip_tokenizer_init": True}
    llm = LLM(str(folder), **(common | {"kv_cache_memory": 4_000_000} | settings))
    sampling_params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling_params, use_tqdm=False)
    return llm, [list(output.outputs[0].token_ids) for output in outputs]


def test_deepseek_tokens_are_unchanged_by_chunks_cache_preemption_and_swap(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK_YARN)
    llm, expected = generate(tmp_path, enable_prefix_caching=False)
    assert generate(tmp_path, max_num_batched_tokens=32)[1] == expected
    sampling_params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    llm, made = generate(tmp_path)
    again = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling_params, use_tqdm=False)
    assert made == [list(output.outputs[0].token_ids) for output in again] == expected
    assert all(output.num_cached_tokens >= 48 for output in again)
    page_bytes = 3 * 16 * 48 * 4
    for swap_memory in (0, 10_000_000):
        llm, made = generate(
            tmp_path, kv_cache_memory=30 * page_bytes, kv_swap_memory=swap_memory, enable_prefix_caching=False
        )
        assert made == expected
        scheduler = llm._engine.scheduler
        assert scheduler.num_preemptions > 0
        assert (scheduler.kv_cache.num_swaps > 0) == (swap_memory > 0)
