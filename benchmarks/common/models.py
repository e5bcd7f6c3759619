"""The models that are measured: public shapes with random weights, and the least that a pass of theirs must do.

MEASURED have targets and tuned configs; the others show what the engine makes of shapes that it was not tuned for, and
"tiny" is for smoke runs.

Bounds are for one NVIDIA H200: weights and KV read once at the measured bandwidth, GEMMs at the measured rate.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12
_QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "num_hidden_layers": 28,
}
_QWEN2 = _QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
}
_QWEN3 = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "vocab_size": 151936,
    "attention_bias": False,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "attention_bias": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": _QWEN2
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": _QWEN2
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": _QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": _LLAMA3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": _QWEN2
    | {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
        "tie_word_embeddings": False,
    },
    "mistral-7b": _LLAMA3
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "vocab_size": 32768,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen2.5-14b": _QWEN2
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "mistral-small-24b": _LLAMA3
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "rope_theta": 1e8,
        "max_position_embeddings": 32768,
        "vocab_size": 131072,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "max_position_embeddings": 163840,
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "attention_bias": False,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
    "tiny": _QWEN2
    | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    },
}

CONFIGS["tiny-experts"] = CONFIGS["tiny"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CONFIGS["tiny-window"] = CONFIGS["tiny"] | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}

_QWEN3_NEXT: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": False,
}
_NEXT_IN_BF16 = ["linear_attn.conv1d", "linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate"]
"""The modules of each layer that Qwen's FP8 checkpoint leaves in bf16."""
CONFIGS |= {
    "qwen3-next-12-layers": _QWEN3_NEXT | {"num_hidden_layers": 12},
    "qwen3-next-80b-a3b-fp8": _QWEN3_NEXT
    | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                "lm_head",
                "model.embed_tokens",
                *(f"model.layers.{layer}.{module}" for layer in range(48) for module in _NEXT_IN_BF16),
            ],
        },
    },
    "granite-4-h-small": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "pad_token_id": 100256,
        "max_position_embeddings": 131072,
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 16,
        "position_embedding_type": "nope",
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_proj_bias": False,
        "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "max_position_embeddings": 128000,
        "vocab_size": 65536,
        "hidden_size": 2048,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_embedding": True,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "max_position_embeddings": 131072,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(24)],
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
}


MEASURED = ["qwen2.5-7b", "qwen2.5-1.5b", "qwen3-0.6b"]


_SHORT_GRANITE = CONFIGS["granite-4-h-small"]
CONFIGS["granite-4-h-small-16-layers"] = _SHORT_GRANITE | {
    "num_hidden_layers": 16,
    "layer_types": _SHORT_GRANITE["layer_types"][:16],
}
"""Four layers in ten of the model, which fits twice beside other engines."""

CONFIGS["qwen3-next-8-layers"] = _QWEN3_NEXT | {"num_hidden_layers": 8}
CONFIGS["glm-4.5-air-4-layers"] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151329,
    "pad_token_id": 151329,
    "max_position_embeddings": 131072,
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}
"""The first layer is dense, and three have experts; the model has 46."""


def model_folder(name: str, root: Path) -> str:
    """A model that engines can load: a config written under `root`, or what was named if it is none of ours."""
    if name not in CONFIGS:
        return name
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": CONFIGS[name]["eos_token_id"]}))
    return str(folder)


def kv_bytes_per_token(folder: str) -> int:
    """Returns the bytes of a token's keys and values in bf16 in the model of this folder."""
    config = config_of(folder)
    if "kv_lora_rank" in config:
        return int(config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 2)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * _attention_layers(config) * config["num_key_value_heads"] * head_dim * 2)


def has_recurrent_state(config: dict[str, Any]) -> bool:
    """Returns True if some layers have a recurrent state, which takes memory for each sequence."""
    return _attention_layers(config) < int(config["num_hidden_layers"])


def _attention_layers(config: dict[str, Any]) -> int:
    """Returns the number of layers with keys and values."""
    num_layers: int = config["num_hidden_layers"]
    if "full_attention_interval" in config:
        return num_layers // int(config["full_attention_interval"])
    if "full_attn_idxs" in config:
        return len(config["full_attn_idxs"])
    return sum(kind not in ("mamba", "conv") for kind in config.get("layer_types", range(num_layers)))


def vocabulary(folder: str, most: int = 150_000) -> int:
    """Ids below it are drawn for prompts: so many as are wanted, if the model of this folder knows them."""
    return min(most, int(config_of(folder)["vocab_size"]))


def config_of(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time that a pass can take, in seconds."""

    layer_weights: int
    head_weights: int
    kv_bytes_per_token: int
    attention_width: int
    num_layers: int

    @staticmethod
    def of(name: str) -> "Bound | None":
        """Returns None for models whose shape is not known here, for mixtures, in which the tokens decide what a pass
        reads, and for hybrids.
        """
        config = CONFIGS.get(name)
        experts = {"num_experts", "n_routed_experts", "num_local_experts"}
        if config is None or not experts.isdisjoint(config) or has_recurrent_state(config):
            return None
        hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        head_dim = config.get("head_dim", hidden // heads)
        layers = config["num_hidden_layers"]
        products = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
        return Bound(
            layers * products, hidden * config["vocab_size"], layers * 4 * kv_heads * head_dim, heads * head_dim, layers
        )

    @property
    def weight_bytes(self) -> int:
        """Of bf16 weights that every pass reads; of the embedding it reads a few rows."""
        return 2 * (self.layer_weights + self.head_weights)

    def decode_s(self, rows: int, context_tokens: float) -> float:
        """One token for each of `rows` sequences of `context_tokens` on average."""
        read = self.weight_bytes + rows * context_tokens * self.kv_bytes_per_token
        return max(read / BYTES_PER_S, 2 * rows * (self.layer_weights + self.head_weights) / FLOPS_PER_S)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """One prompt, of which `cached_tokens` are in the KV cache."""
        pairs = new_tokens * cached_tokens + new_tokens**2 / 2
        flops = 2 * self.layer_weights * new_tokens + 4 * self.num_layers * self.attention_width * pairs
        read = self.weight_bytes + cached_tokens * self.kv_bytes_per_token
        return max(flops / FLOPS_PER_S, read / BYTES_PER_S)

    def batch_s(self, prompts: list[int], outputs: list[int]) -> float:
        """A batch that starts together: all prompts, then steps of those that are not done, each at its context."""
        total = sum(self.prefill_s(tokens) for tokens in prompts)
        for step in range(1, max(outputs)):
            contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
            total += self.decode_s(len(contexts), sum(contexts) / len(contexts))
        return total
