"""Every architecture and every option that changes the numbers: logits equal transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.core.batch import Batch
from mini_infer_engine.layers.linear import blocked_weight
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.registry import MODELS, model_class, read_config
from tests.support.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DEEPSEEK_YARN,
    GATED_DELTA,
    GATED_MOE,
    GEMMA4,
    GEMMA4_INPUTS,
    GEMMA4_MOE,
    GLM_MOE,
    GPT_OSS,
    GRANITE,
    GREEDY,
    LFM2,
    LONGROPE,
    LONGROPE_PARTIAL,
    MAMBA,
    MINIMAX_M2,
    NEMOTRON,
    NEMOTRON_MOE,
    PageDealer,
    chunk,
    reference_logits,
    run_chunks,
    save_tiny_model,
    tiny_runner,
)

TOLERANCE = 1e-4
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(70)]

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 5000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "truncate": False,
    },
}

SOLAR = ("head_dim", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-window-everywhere": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biased": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 11}),
    "gemma3-pattern": (
        "gemma3_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}),
    "phi3-window": ("phi3", {"original_max_position_embeddings": 512, "sliding_window": 18}),
    "phi3-longrope": ("phi3", LONGROPE),
    "phi4-mini": ("phi3", LONGROPE_PARTIAL),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 11}),
    "gemma2-tight-caps": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "num_key_value_heads": 4,
        },
    ),
    "gemma2-no-caps": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 11, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biased": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 19}),
    "granite": (
        "granite",
        {**GRANITE, "rms_norm_eps": 1e-2, "tie_word_embeddings": True},
    ),
    "granite-biased": ("granite", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 0.5}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 14, "tie_word_embeddings": False},
    ),
    "deepseek-v2-lite": ("deepseek_v2", DEEPSEEK),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK_YARN),
    "deepseek-v2-no-shared": ("deepseek_v2", DEEPSEEK | {"n_shared_experts": 0}),
    "deepseek-v2-dense": ("deepseek_v2", DEEPSEEK | {"first_k_dense_replace": 3}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {k: v for k, v in DEEPSEEK.items() if k != "topk_method"}
        | {"n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-unified": ("gemma4_unified_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-inputs": ("gemma4_text", GEMMA4_INPUTS),
    "gemma4-moe": ("gemma4_text", GEMMA4_MOE),
    "gemma4-all": (
        "gemma4_text",
        GEMMA4_INPUTS
        | GEMMA4_MOE
        | {
            "hidden_size_per_layer_input": 8,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 2
            + ["full_attention"]
            + ["sliding_attention"] * 3
            + ["full_attention"],
            "num_kv_shared_layers": 3,
            "attention_bias": True,
            "global_head_dim": 48,
            "num_global_key_value_heads": 2,
            "final_logit_softcapping": None,
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-unbiased": (
        "glm4",
        {
            "head_dim": 24,
            "attention_bias": False,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4-moe": ("glm4_moe", GLM_MOE),
    "glm4-moe-air": (
        "glm4_moe",
        GLM_MOE
        | {
            "head_dim": 24,
            "use_qk_norm": False,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "rope_parameters": {**ROPES["yarn"], "partial_rotary_factor": 0.25},
        },
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        DEEPSEEK_V3
        | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"], "v_head_dim": 24},
    ),
    "solar-open": ("solar_open", {key: value for key, value in GLM_MOE.items() if key in SOLAR}),
    "dots1": ("dots1", GLM_MOE | {"sliding_window": 13, "max_window_layers": 2, "attention_bias": False}),
    "seed-oss": ("seed_oss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": 14, "sliding_window_pattern": 3}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 12,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {**ROPES["yarn"], "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen2-moe": ("qwen2_moe", GATED_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "ernie4.5": ("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 2},
    ),
    "minimax-m2": ("minimax_m2", MINIMAX_M2),
    "minimax-m2-one-kv-head": (
        "minimax_m2",
        MINIMAX_M2 | {"head_dim": 16, "num_key_value_heads": 1, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "deepseek-v3.2": ("deepseek_v32", DEEPSEEK_V32),
    "deepseek-v3.2-short": ("deepseek_v32", DEEPSEEK_V32 | {"index_topk": 128, "first_k_dense_replace": 2}),
    "glm-5": (
        "glm_moe_dsa",
        DEEPSEEK_V32
        | {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 11,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-clamped": (
        "gpt_oss",
        {
            **GPT_OSS,
            "initializer_range": 0.35,  # many gates are beyond the limit
            "attention_bias": False,
            "num_key_value_heads": 1,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": ROPES["yarn"],
        },
    ),
    "qwen3-next": ("qwen3_next", GATED_DELTA | GATED_MOE),
    "qwen3-next-mixed": (
        "qwen3_next",
        GATED_DELTA
        | GATED_MOE
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [1],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5": ("qwen3_5_text", GATED_DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", GATED_DELTA | GATED_MOE),
    "granite-hybrid": ("granitemoehybrid", MAMBA | {"num_local_experts": 0, "tie_word_embeddings": True}),
    "granite-hybrid-moe": (
        "granitemoehybrid",
        MAMBA
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_n_groups": 1,
            "rms_norm_eps": 1e-2,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    "nemotron-h": ("nemotron_h", NEMOTRON | {"mlp_bias": True, "use_bias": True, "use_conv_bias": False}),
    "nemotron-3": ("nemotron_h", NEMOTRON_MOE),
    "nemotron-3-latent": (
        "nemotron_h",
        NEMOTRON_MOE | {"moe_latent_size": 20, "n_group": 2, "norm_topk_prob": False, "residual_in_fp32": True},
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2-biased": ("lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_whole_chunked_and_token_by_token(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    expected = reference_logits(save_tiny_model(tmp_path, architecture, **changes), TOKENS)
    runner = tiny_runner(tmp_path)
    dealer = PageDealer(runner)
    for sizes in ([70], [33, 1, 36], [16, 16, 16, 22], [5] + [1] * 65):
        actual = run_chunks(runner, TOKENS, dealer.table(70), sizes)
        assert (actual - expected).abs().max() <= TOLERANCE, sizes


@pytest.mark.parametrize(
    "variant",
    [
        "qwen2",
        "qwen3-window",
        "gemma3-pattern",
        "phi4-mini",
        "gemma2-tight-caps",
        "smollm3",
        "deepseek-v2-lite",
        "deepseek-v3",
        "deepseek-v3.2",
        "glm4",
        "glm4-moe-air",
        "minimax-m2",
        "gpt-oss",
        "llama-yarn",
    ],
)
def test_rotary_uses_positions_and_the_cache_uses_indexes_when_there_is_a_gap(variant: str, tmp_path: Path) -> None:
    """The last tokens stand further on in the text than in the cache, as if some before them had been evicted."""
    architecture, changes = VARIANTS[variant]
    model = save_tiny_model(tmp_path, architecture, **changes)
    positions = [*range(40), *range(93, 123)]
    expected = reference_logits(model, TOKENS, positions)
    assert (expected - reference_logits(model, TOKENS)).abs().max() > 0.1, "the gap changes nothing"
    runner = tiny_runner(tmp_path)
    dealer = PageDealer(runner)
    for sizes in ([40, 30], [33, 7, 1, 29], [40, 10] + [1] * 20):
        actual = run_chunks(runner, TOKENS, dealer.table(70), sizes, positions)
        assert (actual - expected).abs().max() <= TOLERANCE, sizes


def test_longrope_uses_short_factors_when_the_context_is_the_original_one(tmp_path: Path) -> None:
    tokens = TOKENS[:30]
    expected = reference_logits(save_tiny_model(tmp_path, "phi3", **LONGROPE_PARTIAL), tokens)
    runner = tiny_runner(tmp_path, max_model_len=32)
    actual = run_chunks(runner, tokens, PageDealer(runner).table(30), [12, 1, 17])
    assert (actual - expected).abs().max() <= TOLERANCE
    longer = tiny_runner(tmp_path, max_model_len=33)
    assert (run_chunks(longer, tokens, PageDealer(longer).table(30), [30]) - expected).abs().max() > 0.01


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_a_mixed_batch_equals_each_sequence_alone(page_size: int, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "mistral", sliding_window=24)
    runner = tiny_runner(tmp_path, page_size=page_size)
    dealer = PageDealer(runner)
    lengths = [70, 9, 41, 30]
    sequences = [TOKENS[shift : shift + length] for shift, length in zip([0, 3, 7, 1], lengths, strict=True)]
    tables = [dealer.table(length) for length in lengths]
    for slot in (0, 1, 2):
        before = lengths[slot] - (1 if slot < 2 else 25)
        runner.logits(Batch([chunk(slot, sequences[slot], 0, before, tables[slot])], 0))
    rows = [
        chunk(0, sequences[0], 69, 1, tables[0], sampling=GREEDY),
        chunk(1, sequences[1], 8, 1, tables[1], sampling=GREEDY),
        chunk(2, sequences[2], 16, 25, tables[2], sampling=GREEDY),
        chunk(3, sequences[3], 0, 30, tables[3]),
    ]
    actual = runner.logits(Batch(rows, 2)).split([row.count for row in rows])
    for row, sequence, logits in zip(rows, sequences, actual, strict=True):
        expected = reference_logits(model, sequence)[row.start : row.start + row.count]
        assert (logits - expected).abs().max() <= TOLERANCE


def test_16_bit_weights_are_not_repacked_when_the_cpu_lacks_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False)
    assert blocked_weight(torch.ones(8, 8, dtype=torch.bfloat16)) is None
    assert blocked_weight(torch.ones(8, 8, dtype=torch.float16)) is None
    assert blocked_weight(torch.ones(8, 8)) is not None


def test_bfloat16_logits_stay_near_float32(tmp_path: Path) -> None:
    expected = reference_logits(save_tiny_model(tmp_path, "qwen3"), TOKENS)
    runner = tiny_runner(tmp_path, dtype="bfloat16")
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(70), [60] + [1] * 10).float()
    assert torch.nn.functional.cosine_similarity(actual, expected).min() > 0.99


def test_each_registry_entry_names_a_model_class() -> None:
    for architecture in MODELS:
        assert issubclass(model_class(architecture), DecoderModel)
        assert model_class(architecture).__name__ == architecture


def _config(directory: Path, **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    values = {key: value for key, value in (values | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def test_old_and_new_rope_configs_are_read_alike(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = _config(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    old = _config(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert old == new
    assert new.ropes[0].theta == 5e5
    assert _config(tmp_path, rope_theta=5e5, rope_scaling=None).ropes[0].type == "default"


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("architecture", "changes", "context"),
    [
        ("Llama", {}, 128),
        ("Llama", {"rope_scaling": {"type": "default"}}, 128),
        ("Qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
        ("Qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}}, 384),
        ("Qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}, 128),
        ("Qwen3Moe", {"rope_parameters": {"rope_type": "yarn", "factor": 2.5, "rope_theta": 1e4}}, 320),
        ("Llama", {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32}}, 128),
        ("Llama", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32}}, 128),
        ("Mistral", {"rope_scaling": {"type": "linear", "factor": 8.0}}, 1024),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e4}}, 256),
        (
            "Llama",
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, **LLAMA3}},
            128,
        ),
        ("Phi3", {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 32}, 128),
        ("Gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}, **GEMMA}, 128),
        ("SmolLM3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}}, 256),
    ],
)
def test_the_context_is_extended_by_the_factor_when_the_rope_is_scaled(
    architecture: str, changes: dict[str, Any], context: int, tmp_path: Path
) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "Moe" in architecture else {}
    config = _config(tmp_path, architectures=[f"{architecture}ForCausalLM"], **moe, **changes)
    assert config.max_position_embeddings == context


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_tokens_behind_the_original_context_equal_transformers_when_the_rope_is_scaled(
    rope: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, "qwen2", rope_parameters=ROPES[rope], max_position_embeddings=32)
    runner = tiny_runner(tmp_path, max_model_len=128)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(70), [33, 1, 36])
    assert (actual - reference_logits(model, TOKENS)).abs().max() <= TOLERANCE


def test_config_defaults_equal_those_of_transformers(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.ropes[0].theta) == (4, 16, 10000.0)
    assert _config(tmp_path, rms_norm_eps=0).rms_norm_eps == 0.0
    assert _config(tmp_path, architectures=["MistralForCausalLM"]).sliding_windows == (4096, 4096)
    assert _config(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).sliding_windows == (None, None)
    assert _config(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=8).sliding_windows == (None, None)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    gpt_oss = read_config(tmp_path)
    assert (gpt_oss.num_layers, gpt_oss.sliding_windows[:3]) == (36, (128, None, 128))
    assert (gpt_oss.ropes[0].theta, gpt_oss.ropes[0].factor, gpt_oss.ropes[0].truncate) == (150_000.0, 32.0, False)
    assert gpt_oss.max_position_embeddings == 131_072


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ["architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM", "mini-infer models"],
        ),
        ({"architectures": ...}, ["architectures", "supported"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", "integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": 10**15}, ["num_hidden_layers = 1000000000000000", "at most 10000"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"torch_dtype": "float64"}, ["torch_dtype", "float64", "bfloat16"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "layers"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, ["factor = 0", "positive"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}}, ["beta_fast = -1", "positive"]),
        ({"rope_theta": -1.0}, ["rope_theta = -1.0", "positive"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps = nan", "finite"]),
        ({"rope_theta": 10**400}, ["rope_theta = 1000", "finite"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps = -1e-06", "negative"]),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": ["greedy"]}, ["topk_method", "greedy and group"]),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}
            | {"query_pre_attn_scalar": 0},
            ["query_pre_attn_scalar = 0", "positive"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"eos_token_id": ["a"]}, ["eos_token_id", "'a'"]),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked"]},
            ["layer_types", "chunked"],
        ),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, ["long_factor", "missing"]),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 3}},
            ["long_factor", "8 numbers"],
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0], "long_factor": [1.0] * 8}},
            ["short_factor", "finite positive"],
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [float("nan")] * 8}},
            ["long_factor", "finite positive"],
        ),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "silu"}, ["hidden_activation", "gelu_tanh"]),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}
            | {"attn_logit_softcapping": -1.0},
            ["attn_logit_softcapping", "-1.0"],
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, ["no_rope_layers", "2 ones"]),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, ["residual_multiplier", "positive"]),
        ({"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0}, ["attention_multiplier", "positive"]),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, ["num_experts_per_tok", "at most"]),
        ({"architectures": ["GptOssForCausalLM"], "num_experts_per_tok": 129}, ["num_experts_per_tok", "at most"]),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0}, ["swiglu_limit = 0", "positive"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as raised:
        _config(tmp_path, **changes)
    for word in ["config.json", *words]:
        assert word in str(raised.value)


def test_the_error_names_config_json_when_it_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json holds a list"):
        read_config(tmp_path)


def test_generation_config_gives_eos_ids_and_sampling_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.from_directory(tmp_path) == GenerationDefaults()
    assert _config(tmp_path, eos_token_id=9).eos_token_ids == (9,)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [3, 4], "do_sample": True, "temperature": 0.6, "top_k": 20}))
    assert GenerationDefaults.from_directory(tmp_path) == GenerationDefaults(0.6, top_k=20, eos_token_ids=(3, 4))
    assert _config(tmp_path, eos_token_id=9).eos_token_ids == (3, 4, 9)
    path.write_text(json.dumps({"temperature": "warm"}))
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature = 'warm'"):
        GenerationDefaults.from_directory(tmp_path)
    path.write_text(json.dumps({"max_new_tokens": 0}))
    with pytest.raises(ModelError, match=r"generation_config\.json: max_new_tokens = 0"):
        GenerationDefaults.from_directory(tmp_path)
