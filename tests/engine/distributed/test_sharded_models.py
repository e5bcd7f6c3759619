"""Every architecture, shared out among ranks: logits equal those of the whole model, and are the same on all ranks."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.engine.models.test_models import VARIANTS
from tests.support import fp8_checkpoints, integer_checkpoints
from tests.support.thread_group import ThreadGroup
from tests.support.tiny_models import PageDealer, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SIZES = [30, 1, 9]
CHOSEN = [
    "qwen2", "qwen2-tied", "qwen3-tied", "llama-biased", "mistral-window", "gemma3", "gemma2-tight-caps", "qwen3-moe",
    "qwen3-moe-mixed", "mixtral", "phi3", "phi4-mini", "olmo2", "olmo2-biased", "granite-biased", "smollm3",
]  # fmt: skip


def _check(directory: Path, size: int, **settings: Any) -> None:
    runner = tiny_runner(directory)
    expected = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES)
    group = ThreadGroup(directory, size, tensor_parallel_size=size, **settings)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES))
    assert all(torch.equal(logits, found[0]) for logits in found[1:])
    assert (found[0] - expected).abs().max() < 2e-4
    shares = [rank.worker.weight_bytes for rank in group.runners]
    assert max(shares) < (0.75 if size == 2 else 0.6) * runner.worker.weight_bytes


@pytest.mark.parametrize("size", [2, 4])  # of two KV heads four ranks hold each twice
@pytest.mark.parametrize("variant", CHOSEN)
def test_ranks_compute_what_one_process_does(variant: str, size: int, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    _check(tmp_path, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3-moe-mixed", "mixtral"])
def test_ranks_with_whole_experts_compute_what_one_process_does(variant: str, size: int, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    experts = "num_local_experts" if architecture == "mixtral" else "num_experts"
    save_tiny_model(tmp_path, architecture, **(changes | {experts: 8, "moe_intermediate_size": 33}))
    _check(tmp_path, size, enable_expert_parallel=True)


def test_no_rank_ends_a_chunk_before_all_have_its_keys_and_values(tmp_path: Path) -> None:
    """Whoever is given pages of a group learns from the first rank alone that the chunk is computed."""
    save_tiny_model(tmp_path, "qwen3")
    group = ThreadGroup(tmp_path, 2, tensor_parallel_size=2)
    first, second = group.runners
    last_layer, ended = second.worker.model.layers[-1], Event()
    attend = last_layer.attend

    def late(*arguments: Any) -> Any:
        assert not ended.wait(0.3)
        return attend(*arguments)

    def run(rank: ModelRunner) -> None:
        if rank is second:
            last_layer.attend = late  # type: ignore[method-assign]  # this rank is slow
        rank.collect(rank.launch(Batch([Row(0, 0, 20, TOKENS[:20], table, None)], 0)))
        if rank is first:
            ended.set()

    table = PageDealer(first).table(20)
    group.run(run)
    assert ended.is_set()


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_share_quantised_experts(whole: bool, tmp_path: Path) -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False}
    save_tiny_model(tmp_path, "qwen3_moe", **shape)
    if whole:  # attention has scales of a rank's own columns, experts those that they have without ranks
        alone = tiny_runner(tmp_path, quantization="fp8")
        expected = run_chunks(alone, TOKENS, PageDealer(alone).table(40), [40])
        group = ThreadGroup(tmp_path, 2, quantization="fp8", tensor_parallel_size=2, enable_expert_parallel=True)
        layers = group.runners[0].worker.model.layers
        assert len(layers[0].mlp.weights()[0].values) == 2
        made = group.run(lambda rank: run_chunks(rank, TOKENS, PageDealer(rank).table(40), [40]))
        assert torch.nn.functional.cosine_similarity(made[0], expected).mean() > 0.98
    fp8_checkpoints.quantize_folder(tmp_path, "fp8-block")
    _check(tmp_path, 2, enable_expert_parallel=whole)


def test_experts_that_ranks_cannot_share_equally_are_refused_by_name(tmp_path: Path) -> None:
    asked = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    save_tiny_model(tmp_path / "odd", "qwen3_moe", **(VARIANTS["qwen3-moe"][1] | {"num_experts": 5}))
    with pytest.raises(ModelError, match="enable_expert_parallel: the number of experts = 5 cannot be split among 2"):
        ThreadGroup(tmp_path / "odd", 2, **asked)
    save_tiny_model(tmp_path / "dense", "qwen3")
    with pytest.raises(ModelError, match="has no experts: leave enable_expert_parallel out"):
        ThreadGroup(tmp_path / "dense", 2, **asked)
    with pytest.raises(ValueError, match="enable-expert-parallel deals experts out to the ranks of an engine"):
        EngineSettings(model="m", enable_expert_parallel=True, data_parallel_size=2)


@pytest.mark.parametrize("form", fp8_checkpoints.FORMATS)
def test_fp8_checkpoints_are_shared_out_with_their_scales(form: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=32)
    fp8_checkpoints.quantize_folder(tmp_path, form)
    _check(tmp_path, 2)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_ranks_round_their_own_share_of_the_weights(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=64)
    runner = tiny_runner(tmp_path)
    expected = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES)
    group = ThreadGroup(tmp_path, 2, quantization=kind)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES))
    assert torch.equal(found[0], found[1])
    rounded = tiny_runner(tmp_path, quantization=kind)
    alone = run_chunks(rounded, TOKENS, PageDealer(rounded).table(len(TOKENS)), SIZES)
    nearness = [torch.nn.functional.cosine_similarity(made, expected).mean() for made in (found[0], alone)]
    assert nearness[0] > nearness[1] - 0.1


def test_what_cannot_be_shared_out_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny_model(
        tmp_path, "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=97
    )
    for size, words in ((4, "num_attention_heads = 6"), (2, "num_key_value_heads = 3"), (3, "intermediate_size = 97")):
        with pytest.raises(ModelError, match=f"{words} cannot be split among {size} ranks"):
            ThreadGroup(tmp_path, size)
    save_tiny_model(tmp_path, "llama")
    integer_checkpoints.quantize_folder(tmp_path, next(iter(integer_checkpoints.FORMATS)))
    with pytest.raises(ModelError, match="--tensor-parallel-size 1"):
        ThreadGroup(tmp_path, 2)
