"""Checkpoints of integers, shared out among ranks: logits equal those of one process, and what cannot be is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.folder import model_folder
from mini_infer_engine.models.decoder import DecoderModel
from tests.support.gguf_files import tiny_vocabulary, write_gguf
from tests.support.integer_checkpoints import FORMATS, quantize_folder
from tests.support.thread_group import ThreadGroup
from tests.support.tiny_models import DEEPSEEK, PageDealer, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SIZES = [30, 1, 9]
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False}


def _check(directory: Path, size: int, largest: float = 2e-4, **settings: Any) -> None:
    runner = tiny_runner(directory, **{name: value for name, value in settings.items() if name == "gguf_blocks"})
    expected = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), SIZES)
    group = ThreadGroup(directory, size, **settings)
    table = PageDealer(group.runners[0]).table(len(TOKENS))
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, SIZES))[-2:]
    assert all(torch.equal(logits, found[0]) for logits in found[1:])
    assert (found[0] - expected).abs().max() < largest
    assert max(rank.worker.weight_bytes for rank in group.runners) < 0.75 * runner.worker.weight_bytes


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_tensor_parallel_logits_equal_one_process(architecture: str, form: str, tmp_path: Path) -> None:
    """With layers of several parts, with biases, and with parts that are one tensor."""
    changes = {"original_max_position_embeddings": 512} if architecture == "phi3" else {}
    save_tiny_model(tmp_path, architecture, **LLAMA, **changes, tie_word_embeddings=False)
    quantize_folder(tmp_path, form)
    _check(tmp_path, 2)


@pytest.mark.parametrize("form", ["gptq-act-order", "gptq-8-rows", "awq", "w4a16-asymmetric", "w8a8-tensor-asymmetric"])
def test_kv_heads_are_replicated_when_there_are_more_ranks_than_heads(form: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **LLAMA)
    quantize_folder(tmp_path, form)
    _check(tmp_path, 4)


@pytest.mark.parametrize(("vocab_size", "size"), [(208, 2), (192, 4)])  # the last rank has 80 of 128 rows, or none
@pytest.mark.parametrize("form", ["gptq", "w4a16-asymmetric", "w8a8"])
def test_a_quantised_lm_head_is_sharded_over_ranks(form: str, vocab_size: int, size: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **LLAMA, vocab_size=vocab_size)
    quantize_folder(tmp_path, form, head=True)
    _check(tmp_path, size)


@pytest.mark.parametrize("form", ["gptq", "awq", "w4a16-asymmetric"])
def test_logits_equal_one_process_for_pipeline_stages_of_several_ranks(form: str, tmp_path: Path) -> None:
    """Biases of other stages are not read, and need not be zero."""
    save_tiny_model(tmp_path, "qwen2", **LLAMA, tie_word_embeddings=False)
    quantize_folder(tmp_path, form)
    _check(tmp_path, 2, num_stages=2)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("form", ["gptq", "awq", "w4a16-asymmetric", "w8a8", "w8a8-tensor-asymmetric"])
def test_experts_are_sharded_by_width_or_whole(form: str, whole: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", **QWEN_MOE, head_dim=32)
    quantize_folder(tmp_path, form)
    _check(tmp_path, 2, tensor_parallel_size=2, enable_expert_parallel=whole)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("form", ["awq", "w4a16-asymmetric"])
def test_latent_attention_heads_and_shared_experts_are_sharded(form: str, whole: bool, tmp_path: Path) -> None:
    shape = {"q_lora_rank": 64, "v_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64}
    save_tiny_model(tmp_path, "deepseek_v2", **(DEEPSEEK | shape))
    quantize_folder(tmp_path, form)
    _check(tmp_path, 2, tensor_parallel_size=2, enable_expert_parallel=whole)


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("gptq", {"intermediate_size": 96}, "mlp.down_proj.*columns.*groups of 32"),
        ("w4a16", {"intermediate_size": 96}, "mlp.down_proj.*columns.*groups of 32"),
        ("awq", {"intermediate_size": 96}, "mlp.down_proj.*columns.*groups of 32"),
        ("w8a16-packed", {"intermediate_size": 100}, "columns.*words of 4"),
        ("gptq-8-rows", {"head_dim": 10}, "qkv_proj.*rows.*words of 4"),
        ("awq", {"intermediate_size": 104, "head_dim": 64}, "mlp.gate_up_proj.*rows.*104"),
    ],
)
def test_sharding_is_refused_before_allocation_when_it_would_cut_packed_words_or_groups(
    form: str, changes: dict[str, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    save_tiny_model(tmp_path, "llama", **(LLAMA | changes))
    quantize_folder(tmp_path, form)
    with pytest.raises(ModelError, match=words):
        ThreadGroup(tmp_path, 2)


@pytest.mark.parametrize(("architecture", "changes"), [("llama", LLAMA), ("qwen3_moe", QWEN_MOE | {"head_dim": 32})])
@pytest.mark.parametrize("form", ["gptq", "awq", "w4a16-asymmetric"])
def test_both_ranks_have_the_scales_when_a_group_is_cut(
    form: str, architecture: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of 64 and a half each, of the MLP's or of the experts' width."""
    monkeypatch.setitem(FORMATS, form, FORMATS[form] | {"group_size": 64})
    save_tiny_model(tmp_path, architecture, **(changes | {"intermediate_size": 192, "moe_intermediate_size": 192}))
    quantize_folder(tmp_path, form)
    _check(tmp_path, 2, tensor_parallel_size=2)


@pytest.mark.parametrize("form", ["gptq-act-order", "awq", "w4a16-asymmetric"])
def test_dummy_weights_of_a_quantised_checkpoint_run(form: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **LLAMA)
    quantize_folder(tmp_path, form)
    group = ThreadGroup(tmp_path, 2, load_format="dummy")
    table = PageDealer(group.runners[0]).table(40)
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, [40]))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)


def test_experts_can_be_whole_when_sharding_would_cut_them(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", **(QWEN_MOE | {"moe_intermediate_size": 96}), head_dim=32)
    quantize_folder(tmp_path, "awq")
    words = r"experts\.0\.down_proj: a rank's columns 0 to 48 of 96.*--enable-expert-parallel leaves experts whole"
    with pytest.raises(ModelError, match=words):
        ThreadGroup(tmp_path, 2)
    _check(tmp_path, 2, tensor_parallel_size=2, enable_expert_parallel=True)


def test_per_channel_weights_are_sharded_at_any_row(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **(LLAMA | {"intermediate_size": 102}))
    quantize_folder(tmp_path, "w8a8")
    _check(tmp_path, 2)


@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_K])
def test_logits_equal_one_process_when_ranks_share_packed_gguf_blocks(
    encoding: Encoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks cut blocks of 256 columns at groups of 32, and tokens between the two."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "vocab_size": 208, "num_hidden_layers": 1}
    tokenizer = tiny_vocabulary()
    tokenizer["tokens"] += [f"[PAD{index}]" for index in range(199, 208)]
    tokenizer["token_type"] += [5] * 9
    write_gguf(tmp_path / "m.gguf", "llama", encoding=encoding, tokenizer=tokenizer, **shape)
    _check(model_folder(tmp_path / "m.gguf"), 2, largest=2e-3, gguf_blocks="packed")
