"""Models whose code is transformers', shared among ranks by their own plans: the text is that of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.models.transformers_backend.model import TransformersModel
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.engine.models.test_transformers_backend import LENGTH, PROMPTS, generate, make_engine
from tests.support.parallel_asks import GREEDY, results_of, small_llm
from tests.support.thread_group import RanksTogether, ThreadGroup
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_models import ARCHITECTURES, MODELS, SHARDED, UNSHARDED, save_model

SAMPLED = ("cohere2", "glm4", "olmo3", "qwen2_moe", "dots1")
"""The models of `make test`: windows and tied heads, columns that are gathered, heads that are, and both ways of
sharing experts.
"""


def sharded_engine(directory: Path, size: int, **changes: Any) -> tuple[Engine, ThreadGroup]:
    settings = {"tensor_parallel_size": size, "disable_hybrid_kv_cache_manager": False} | changes
    group = ThreadGroup(directory, size, **settings)
    runner = RanksTogether(group)
    engine_settings = EngineSettings(model=str(directory), device="cpu", max_num_seqs=16, **settings)
    return Engine(engine_settings, runner, (), runner.max_model_len, "revision"), group


def check_text(directory: Path, model_type: str, sizes: tuple[int, ...], length: int, **changes: Any) -> None:
    """Compares the text and the pages of several ranks with those of one process."""
    save_model(directory, model_type)
    alone, whole = make_engine(directory, model_impl="transformers")
    expected = generate(alone, PROMPTS, length)
    assert max(len(set(tokens)) for tokens in expected) > 3, "a text that repeats one token shows nothing"
    for size in sizes:
        engine, group = sharded_engine(directory, size, model_impl="transformers", **changes)
        assert generate(engine, PROMPTS, length) == expected, f"{size} ranks"
        heads = whole.pool.spec.num_kv_heads
        assert {rank.pool.spec.num_kv_heads for rank in group.runners} == {max(1, heads // size)}
        assert {rank.kv_cache for rank in group.runners} == {whole.kv_cache}
        shares = [rank.worker.weight_bytes for rank in group.runners]
        assert max(shares) < 0.95 * whole.worker.weight_bytes


@pytest.mark.parametrize("model_type", SAMPLED)
def test_text_is_that_of_one_process_when_two_ranks_share_a_model(model_type: str, tmp_path: Path) -> None:
    check_text(tmp_path, model_type, (2,), 16)


@pytest.mark.models
@pytest.mark.parametrize("model_type", SHARDED)
def test_text_of_every_model_is_that_of_one_process_when_ranks_share_it(model_type: str, tmp_path: Path) -> None:
    check_text(tmp_path, model_type, MODELS[model_type].ranks, LENGTH)


def test_text_is_that_of_one_process_when_ranks_have_whole_experts(tmp_path: Path) -> None:
    check_text(tmp_path, "dots1", (2,), 16, enable_expert_parallel=True)


def test_text_is_that_of_one_process_when_ranks_are_processes(tmp_path: Path) -> None:
    save_model(tmp_path, "cohere2")
    alone, group = small_llm(tmp_path), small_llm(tmp_path, tensor_parallel_size=2)
    assert group.model_info.model_impl == "transformers"
    assert results_of(group, PROMPTS, GREEDY) == results_of(alone, PROMPTS, GREEDY)


def test_both_implementations_make_one_text_when_ranks_share_a_model(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    native, _ = make_engine(tmp_path)
    engine, _ = sharded_engine(tmp_path, 2, model_impl="transformers")
    assert generate(engine, PROMPTS, 16) == generate(native, PROMPTS, 16)


@pytest.mark.parametrize(
    "model_type", ["gpt2", *(pytest.param(name, marks=pytest.mark.models) for name in UNSHARDED if name != "gpt2")]
)
def test_a_model_is_refused_with_the_reason_when_transformers_has_no_plan_for_it(
    model_type: str, tmp_path: Path
) -> None:
    save_model(tmp_path, model_type)
    with pytest.raises(ModelError, match="tensor_parallel_size") as refused:
        sharded_engine(tmp_path, 2)
    assert ARCHITECTURES[model_type] in str(refused.value)
    assert "plan" in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "size", "config", "settings", "named"),
    [
        ("cohere2", 3, {}, {}, "num_attention_heads = 4"),
        ("cohere2", 2, {"intermediate_size": 97}, {}, "mlp.gate_proj = 97"),
        ("qwen2_moe", 4, {}, {}, "gate_up_proj = 6"),
        ("dots1", 2, {"moe_intermediate_size": 40}, {}, "a multiple of 8"),
        ("cohere2", 2, {}, {"enable_expert_parallel": True}, "enable_expert_parallel"),
        ("cohere2", 1, {}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
    ids=["heads", "width", "whole experts", "narrow experts", "no experts", "pipeline"],
)
def test_ranks_are_refused_by_name_when_they_cannot_divide_a_model(
    model_type: str, size: int, config: dict[str, Any], settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_model(tmp_path, model_type)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | config))
    stages = settings.get("pipeline_parallel_size", 1)
    with pytest.raises(ModelError, match=named) as refused:
        ThreadGroup(tmp_path, size, stages, model_impl="transformers", tensor_parallel_size=size, **settings)
    assert ARCHITECTURES[model_type] in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "share"), [("dots1", 1.0), ("qwen2_moe", 0.5)], ids=["experts by width", "whole experts"]
)
def test_a_rank_reads_its_part_alone_when_ranks_share_experts(
    model_type: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with whole experts read half of the tensors, all others half of each."""
    save_model(tmp_path, model_type)
    stored = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if ".experts." in name}
    read: dict[SafetensorsCheckpoint, dict[str, int]] = {}

    def recording(self: SafetensorsCheckpoint, file: Path, parts: Any, place: Any) -> None:
        own = read.setdefault(self, {})

        def record(name: str, tensor: torch.Tensor) -> None:
            own[name] = tensor.numel()
            place(name, tensor)

        plain(self, file, parts, record)

    plain = SafetensorsCheckpoint.read
    monkeypatch.setattr(SafetensorsCheckpoint, "read", recording)
    sharded_engine(tmp_path, 2, model_impl="transformers")
    assert len(read) == 2
    for own in read.values():
        experts = {name: count for name, count in own.items() if name in stored}
        assert len(experts) == share * len(stored)
        assert sum(experts.values()) == sum(tensor.numel() for tensor in stored.values()) / 2


def test_a_stored_head_is_used_when_ranks_share_one_that_differs_from_the_embeddings(tmp_path: Path) -> None:
    save_model(tmp_path, "cohere2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    alone, _ = make_engine(tmp_path)
    engine, group = sharded_engine(tmp_path, 2)
    assert generate(engine, PROMPTS, 16) == generate(alone, PROMPTS, 16)
    model = group.runners[0].worker.model
    assert isinstance(model, TransformersModel)
    assert model.causal.get_output_embeddings().weight is not model.causal.get_input_embeddings().weight
