"""gpt-oss on a CPU: experts in MXFP4, rounded on load, and shared out; text by `LLM`; what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kernels.gemm.grouped_weight import dequantized_groups
from mini_infer_engine.layers.moe import swiglu_oai
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.support.fp4_checkpoints import quantize_folder, quantize_stacked_experts
from tests.support.harmony_tokens import IDS, VOCAB_SIZE, harmony_files
from tests.support.thread_group import ThreadGroup
from tests.support.tiny_models import (
    GPT_OSS,
    PageDealer,
    reference_logits,
    run_chunks,
    save_tiny_model,
    tiny_runner,
)

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SHAPE: dict[str, Any] = GPT_OSS | {"num_local_experts": 4, "intermediate_size": 64, "num_hidden_layers": 2}


def logits_of(runner: ModelRunner) -> torch.Tensor:
    return run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])


@pytest.fixture
def quantised(tmp_path: Path) -> tuple[Path, Any]:
    """A folder with experts in MXFP4, and transformers' model with the weights that they stand for."""
    model = save_tiny_model(tmp_path, "gpt_oss", **SHAPE)
    plain = reference_logits(model, TOKENS)
    model.load_state_dict(quantize_stacked_experts(tmp_path))
    assert (reference_logits(model, TOKENS) - plain).abs().max() > 1e-2
    return tmp_path, model


def test_logits_equal_those_of_the_dequantised_weights_when_experts_are_mxfp4(quantised: tuple[Path, Any]) -> None:
    folder, model = quantised
    runner = tiny_runner(folder)
    assert (logits_of(runner) - reference_logits(model, TOKENS)).abs().max() <= 1e-4
    gate_up, down = runner.worker.model.layers[0].mlp.weights()
    assert {gate_up.kind, down.kind} == {"fp4"}, "they stay packed in memory"


def test_mxfp4_weights_are_dequantised_as_by_transformers(quantised: tuple[Path, Any]) -> None:
    folder, _ = quantised
    stored = load_file(folder / "model.safetensors")
    runner, path = tiny_runner(folder), "model.layers.1.mlp.experts"
    gate_up, down = runner.worker.model.layers[1].mlp.weights()
    both = dequantized_groups(gate_up)
    theirs = dequantised_by_transformers(stored, f"{path}.gate_up_proj")  # [experts, hidden, alternating rows]
    assert torch.equal(both[:, :64], theirs[..., ::2].transpose(1, 2))
    assert torch.equal(both[:, 64:], theirs[..., 1::2].transpose(1, 2))
    assert torch.equal(
        dequantized_groups(down), dequantised_by_transformers(stored, f"{path}.down_proj").transpose(1, 2)
    )


def dequantised_by_transformers(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    made: torch.Tensor = convert_moe_packed_tensors(
        stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32
    )
    return made


@pytest.mark.parametrize(("size", "whole"), [(2, False), (2, True), (4, True)])
def test_logits_of_ranks_equal_one_process_when_experts_are_mxfp4(
    size: int, whole: bool, quantised: tuple[Path, Any]
) -> None:
    folder, model = quantised
    group = ThreadGroup(folder, size, tensor_parallel_size=size, enable_expert_parallel=whole)
    table = PageDealer(group.runners[0]).table(40)
    found = group.run(lambda rank: run_chunks(rank, TOKENS, table, [17, 1, 22]))
    assert all(torch.equal(logits, found[0]) for logits in found[1:])
    assert (found[0] - reference_logits(model, TOKENS)).abs().max() <= 2e-4


def test_ranks_are_refused_by_name_when_they_cut_groups_of_mxfp4(
    quantised: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    with pytest.raises(ModelError, match=r"16 .*groups of 32.*--enable-expert-parallel"):
        ThreadGroup(quantised[0], 4)


def test_dummy_weights_run_when_experts_are_mxfp4(quantised: tuple[Path, Any]) -> None:
    runner = tiny_runner(quantised[0], load_format="dummy")
    assert torch.isfinite(logits_of(runner)).all()


def test_greedy_text_equals_that_of_transformers_when_experts_are_mxfp4(quantised: tuple[Path, Any]) -> None:
    """By the Python API: prompts in chunks, beside each other, and then from the cache."""
    folder, model = quantised
    prompts = [TOKENS[:9], TOKENS[3:40]]
    options = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24, "eos_token_id": None}
    expected = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    limits = {"kv_cache_memory": 16_000_000, "max_num_batched_tokens": 20}
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, **limits)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for _ in ("computed", "cached"):
        made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in made] == expected


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_experts_are_rounded_on_load(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_oss", **SHAPE)
    plain, rounded = tiny_runner(tmp_path), tiny_runner(tmp_path, quantization=kind, quantization_calibration="none")
    assert rounded.worker.weight_bytes < 0.8 * plain.worker.weight_bytes
    near = torch.nn.functional.cosine_similarity(logits_of(plain), logits_of(rounded)).mean()
    assert 0.9 < near < 0.999999


def test_int4_is_calibrated_by_texts_when_heads_have_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "gpt_oss", **SHAPE)
    rows = torch.arange(480).view(2, 240) * 7 % 190 + 5
    monkeypatch.setattr("mini_infer_engine.runtime.worker.calibration_rows", lambda _: rows)
    expected = logits_of(tiny_runner(tmp_path))
    made = logits_of(tiny_runner(tmp_path, quantization="int4"))
    assert torch.nn.functional.cosine_similarity(made, expected).mean() > 0.9


def with_quantization(folder: Path, **config: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))


def test_another_form_of_experts_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    save_tiny_model(tmp_path, "gpt_oss", **SHAPE)
    with_quantization(tmp_path, quant_method="fp8", weight_block_size=[128, 128])
    with pytest.raises(ModelError, match=r"experts of model\.layers\.0\.mlp.*mxfp4"):
        tiny_runner(tmp_path)
    save_tiny_model(tmp_path, "gpt_oss", **(SHAPE | {"intermediate_size": 48}))
    with_quantization(tmp_path, quant_method="mxfp4")
    with pytest.raises(ModelError, match=r"48 .*groups of 32"):
        tiny_runner(tmp_path)


def test_mxfp4_is_refused_by_name_when_an_architecture_has_no_stacked_experts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    quantize_folder(tmp_path, "mxfp4")
    with_quantization(tmp_path, quant_method="mxfp4")
    with pytest.raises(ModelError, match=r"quant_method = 'mxfp4': Qwen2ForCausalLM"):
        tiny_runner(tmp_path)


def test_flash_attention_is_refused_by_name_when_heads_have_sinks(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mini_infer_engine.runtime.attention.triton_backends import triton_backend

    save_tiny_model(tmp_path, "gpt_oss", **SHAPE)
    layers = tiny_runner(tmp_path).worker.model.attention_layers
    unused: Any = None
    with pytest.raises(ModelError, match=r"attention_backend = 'flash'.*'triton'"):
        triton_backend(layers, unused, 512, unused, run_prefill=torch.empty)


@pytest.mark.parametrize("part", ["gate_up_proj_scales", "down_proj_blocks", "gate_up_proj_bias"])
def test_a_missing_tensor_of_experts_is_named_before_memory_is_taken(
    part: str, quantised: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantised
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.1.mlp.experts.{part}"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors")
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    with pytest.raises(ModelError, match=name):
        tiny_runner(folder)


def test_the_limit_bounds_gate_and_up() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([0.5, 9.0, -9.0])
    bounded = torch.tensor([7.0, -9.0, 1.0]), torch.tensor([0.5, 7.0, -7.0])
    expected = bounded[0] * torch.sigmoid(1.702 * bounded[0]) * (bounded[1] + 1)
    assert torch.allclose(swiglu_oai(gate, up, 7.0), expected)


def test_outputs_end_at_calls_when_no_file_names_their_token_as_eos(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_oss", **(SHAPE | {"vocab_size": VOCAB_SIZE, "eos_token_id": IDS["<|return|>"]}))
    assert read_config(tmp_path).eos_token_ids == (IDS["<|return|>"],), "there is no tokenizer"
    for name, text in harmony_files().files.items():
        (tmp_path / name).write_text(text)
    assert read_config(tmp_path).eos_token_ids == (IDS["<|return|>"], IDS["<|call|>"])
    (tmp_path / "tokenizer.json").write_text("{")
    assert read_config(tmp_path).eos_token_ids == (IDS["<|return|>"],), "whoever reads texts reports it"


def test_the_published_config_is_read(tmp_path: Path) -> None:
    """config.json of gpt-oss-20b, in the older form of its rotation."""
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = read_config(tmp_path)
    assert config.max_position_embeddings == 131_072
    assert config.quantization is not None
    assert config.quantization.name == "mxfp4"
    assert config.quantization.scheme_of("model.layers.3.mlp.experts") is not None
    assert config.quantization.scheme_of("model.layers.3.self_attn.q_proj") is None
    rope = config.ropes[0]
    assert (rope.type, rope.theta, rope.factor, rope.truncate) == ("yarn", 150_000.0, 32.0, False)
