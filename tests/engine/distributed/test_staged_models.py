"""Models in stages: what the last stage computes is what the whole model does, and each holds its share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.engine.models.test_models import VARIANTS
from tests.support import fp8_checkpoints
from tests.support.mixed_checkpoints import Group
from tests.support.mixed_checkpoints import quantize_folder as quantize_mixed
from tests.support.thread_group import ThreadGroup, ThreadLink
from tests.support.tiny_models import PageDealer, chunk, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SIZES = [30, 1, 9]
CHOSEN = [
    "qwen2", "qwen2-tied", "mistral-window", "gemma3", "qwen3-moe-mixed", "phi3", "olmo2", "granite-biased", "smollm3",
    "deepseek-v2", "gpt-oss", "glm4-moe", "minimax-m2", "deepseek-v3.2",
]  # fmt: skip


def _check(directory: Path, size: int, num_stages: int) -> ThreadGroup:
    runner = tiny_runner(directory)
    expected = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES)
    group = ThreadGroup(directory, size, num_stages)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES))[-size:]
    assert all(torch.equal(logits, found[0]) for logits in found[1:])
    if size == 1:
        assert torch.equal(found[0], expected)
    assert (found[0] - expected).abs().max() < 2e-4
    layers = [len(rank.worker.model.layers) for rank in group.runners]
    assert sum(layers) == size * runner.config.num_layers
    assert max(rank.pool.spec.page_bytes for rank in group.runners) < runner.pool.spec.page_bytes
    assert len({(rank.num_pages, len(rank.pool.host_pages)) for rank in group.runners}) == 1
    assert max(rank.worker.weight_bytes for rank in group.runners) < runner.worker.weight_bytes
    return group


@pytest.mark.parametrize("variant", CHOSEN)
def test_pipeline_logits_equal_one_process(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    config = tiny_runner(tmp_path).config
    group = _check(tmp_path, 1, config.num_layers)
    has_table = [rank.worker.model.model.embed_tokens is not None for rank in group.runners]
    middle = [False] * (config.num_layers - 2)
    assert has_table == [True, *middle, config.tie_word_embeddings]


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3-next": {"full_attention_interval": 2},
    "granite-hybrid-moe": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "nemotron-h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2, "num_hidden_layers": 6},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
}
"""Tiny hybrids of which each half has layers of both kinds."""


@pytest.mark.parametrize(("variant", "size"), [*((variant, 1) for variant in HYBRIDS), ("qwen3-next", 2)])
def test_pipeline_logits_equal_one_process_when_layers_have_a_recurrent_state(
    variant: str, size: int, tmp_path: Path
) -> None:
    """Each stage has the states of its own layers; the prompt resumes from a checkpoint of them all."""
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes | HYBRIDS[variant])
    group = _check(tmp_path, size, 2)
    states = [rank.pool.states for rank in group.runners]
    assert [0 if pool is None else pool.spec.num_layers for pool in states] == [1] * 2 * size
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    whole = tiny_runner(tmp_path)
    expected = run_chunks(whole, TOKENS, PageDealer(whole).table(len(TOKENS)), [len(TOKENS)])

    def resumed(rank: ModelRunner) -> torch.Tensor:
        rank.logits(Batch([chunk(0, TOKENS, 0, 32, table, checkpoints=[(16, 1)])], 0))
        return rank.logits(Batch([chunk(1, TOKENS, 16, 24, table, state_source=1)], 0))

    assert (group.run(resumed)[-1] - expected[16:]).abs().max() < 2e-4


def test_pipeline_parallelism_is_refused_when_a_stage_has_no_layer_of_attention(tmp_path: Path) -> None:
    architecture, changes = VARIANTS["qwen3-next"]
    save_tiny_model(tmp_path, architecture, **changes)
    with pytest.raises(ModelError, match="--pipeline-parallel-size 2"):
        ThreadGroup(tmp_path, 1, 2)


@pytest.mark.parametrize("variant", ["qwen3-tied", "olmo2", "deepseek-v3"])
def test_logits_equal_one_process_for_pipeline_stages_of_several_ranks(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    _check(tmp_path, 2, 2)


def test_fp8_checkpoints_are_loaded_by_pipeline_stage(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=32)
    fp8_checkpoints.quantize_folder(tmp_path, fp8_checkpoints.FORMATS[0])
    _check(tmp_path, 1, 2)


def test_mixed_quantised_checkpoints_are_loaded_by_pipeline_stage(tmp_path: Path) -> None:
    """A layer is called what the whole model calls it, whichever stage has it."""
    save_tiny_model(tmp_path, "llama", head_dim=16)
    own = Group("w8a8", (r"re:model\.layers\.2\.mlp.*",), ("2.mlp.gate_proj", "2.mlp.up_proj", "2.mlp.down_proj"))
    quantize_mixed(tmp_path, [own, Group("w4a16", ("Linear",), ("_proj",))])
    _check(tmp_path, 1, 2)


def test_sampled_tokens_reach_the_first_stage_before_their_next_rows(tmp_path: Path) -> None:
    """Two sequences take turns: both have a pass in flight when either goes on."""
    save_tiny_model(tmp_path, "qwen3")
    sampling_params = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, max_tokens=8)
    prompts = [TOKENS[:9], TOKENS[9:30]]

    def batches(dealer: PageDealer) -> list[Batch]:
        tables = [dealer.table(40) for _ in prompts]
        made = [
            Batch([Row(slot, 0, len(ids), ids, tables[slot], sampling_params, 77 + slot, known_token_ids=ids)], 0)
            for slot, ids in enumerate(prompts)
        ]
        for index in range(1, 7):
            for slot, ids in enumerate(prompts):
                row = Row(slot, len(ids) + index - 1, 1, None, tables[slot], sampling_params, 77 + slot, index)
                made.append(Batch([row], 1))
        return made

    runner = tiny_runner(tmp_path)
    expected = [runner.collect(runner.launch(batch)).tokens for batch in batches(PageDealer(runner))]
    group = ThreadGroup(tmp_path, 1, 2)
    steps = batches(PageDealer(group.runners[0]))
    found = group.run(lambda rank: [rank.launch(batch) for batch in steps])[-1]
    assert [handle.result().tokens for handle in found] == expected
    first = group.runners[0].executor
    assert len(first.traffic._returning) <= 2  # type: ignore[attr-defined]


def test_the_first_stage_receives_a_token_only_when_a_row_needs_it(tmp_path: Path) -> None:
    """A receive that waits for its sender would hold a part of a GPU that other passes want."""
    save_tiny_model(tmp_path, "qwen3")
    first, last = ThreadGroup(tmp_path, 1, 2).runners
    table, link = PageDealer(first).table(20), first.worker.link
    assert isinstance(link, ThreadLink)

    def both(row: Row, num_decodes: int) -> None:
        for stage in (first, last):
            stage.collect(stage.launch(Batch([row], num_decodes)))

    sampling_params = SamplingParams(temperature=0)
    both(Row(0, 0, 9, TOKENS[:9], table, sampling_params), 0)
    assert link.num_tokens_received == 0
    both(Row(1, 0, 9, TOKENS[:9], PageDealer(first).table(20), None), 0)
    assert link.num_tokens_received == 0
    both(Row(0, 9, 1, None, table, sampling_params, output_index=1), 1)
    assert link.num_tokens_received == 1


def test_pipeline_parallelism_is_refused_when_there_are_more_stages_than_layers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"3 layers.*4 stages.*--pipeline-par"):
        ThreadGroup(tmp_path, 1, 4)


def test_every_stage_reports_a_tensor_when_no_stage_uses_it(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_hidden_layers=4)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 3'))
    with pytest.raises(ModelError, match=r"model.layers.3\S+ .*LlamaForCausalLM"):
        ThreadGroup(tmp_path, 1, 2)
