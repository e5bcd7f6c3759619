"""Translates GGUF's architectures with experts in every layer of attention. It knows no file. No torch."""

from typing import Any

from mini_infer_engine.gguf.dense import LLAMA_BLOCK
from mini_infer_engine.gguf.translation import EXPERT, Architecture, Fusion, Metadata

SIGMOID = 2
"""The value of `expert_gating_func` of routers whose scores are sigmoids."""
_LOG_MULTIPLIER = 0.1
"""YaRN's factor of the logarithm of its scale, with which DeepSeek's `mscale_all_dim` is stored."""
EXPERTS_BLOCK = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
}
_MIXTRAL_BLOCK = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EXPERT}.w1",
    "ffn_down_exps": f"block_sparse_moe.experts.{EXPERT}.w2",
    "ffn_up_exps": f"block_sparse_moe.experts.{EXPERT}.w3",
}
_DEEPSEEK_BLOCK = (
    LLAMA_BLOCK
    | EXPERTS_BLOCK
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }
)
_LATENTS = Fusion("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), "latents")
_GPT_OSS_BLOCK = LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_GATE_AND_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_DOWN = ("ffn_down_exps.weight",)
_GPT_OSS_EXPERTS = (
    Fusion("mlp.experts.gate_up_proj_blocks", _GATE_AND_UP, "mxfp4_fused_blocks", "MXFP4"),
    Fusion("mlp.experts.gate_up_proj_scales", _GATE_AND_UP, "mxfp4_fused_scales", "MXFP4"),
    Fusion("mlp.experts.down_proj_blocks", _DOWN, "mxfp4_blocks", "MXFP4"),
    Fusion("mlp.experts.down_proj_scales", _DOWN, "mxfp4_scales", "MXFP4"),
    Fusion("mlp.experts.gate_up_proj", _GATE_AND_UP, "expert_columns"),
    Fusion("mlp.experts.down_proj", _DOWN, "transposed_experts"),
    Fusion("mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), "expert_biases"),
)


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
    }


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _deepseek(metadata: Metadata) -> dict[str, Any]:
    """Returns the fields of latent attention and experts. Newer files have the widths of a head as `..._mla`, older
    ones in their usual place.
    """
    rotated = metadata.need("rope.dimension_count")
    key_width = metadata.get("attention.key_length_mla") or metadata.need("attention.key_length")
    groups = metadata.get("expert_group_count", 0)
    fields = {
        "head_dim": rotated,
        "num_key_value_heads": metadata.width("attention.head_count"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": metadata.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_width - rotated,
        "v_head_dim": metadata.get("attention.value_length_mla") or metadata.need("attention.value_length"),
        "n_routed_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "n_shared_experts": metadata.get("expert_shared_count", 0),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "n_group": groups or 1,
        "topk_group": metadata.get("expert_group_used_count", 0) or 1,
    }
    if metadata.get("rope.scaling.type") == "yarn":
        scale = metadata.get("rope.scaling.yarn_log_multiplier", 0.0) / _LOG_MULTIPLIER
        fields["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": metadata.need("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.need("rope.scaling.original_context_length"),
        } | ({"mscale": scale, "mscale_all_dim": scale} if scale else {})
    return fields


def _deepseek2(metadata: Metadata) -> dict[str, Any]:
    fields = _deepseek(metadata)
    return fields | {"topk_method": "greedy" if fields["n_group"] == 1 else "group_limited_greedy"}


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Returns the fields of gpt-oss; windows and full attention alternate, and its YaRN rounds no dimension."""
    fields = {
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "intermediate_size": metadata.need("expert_feed_forward_length"),
        "sliding_window": metadata.need("attention.sliding_window"),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }
    if metadata.get("rope.scaling.type") == "yarn":
        fields["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": metadata.need("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.need("rope.scaling.original_context_length"),
            "truncate": False,
        }
    experts = metadata.header.tensors.get("blk.0.ffn_gate_exps.weight")
    if experts is not None and experts.encoding == "MXFP4":
        fields["quantization_config"] = {"quant_method": "mxfp4"}
    return fields


EXPERTS = {
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM", _deepseek2, _DEEPSEEK_BLOCK, rotates_apart=True, fusions=(_LATENTS,)
    ),
    "deepseek3": Architecture(
        "DeepseekV3ForCausalLM", _deepseek, _DEEPSEEK_BLOCK, rotates_apart=True, fusions=(_LATENTS,)
    ),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss, _GPT_OSS_BLOCK, fusions=_GPT_OSS_EXPERTS),
    "mixtral": Architecture("MixtralForCausalLM", _mixtral, LLAMA_BLOCK | _MIXTRAL_BLOCK, interleaves=True),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3moe, LLAMA_BLOCK | EXPERTS_BLOCK),
}
"""Translations by `general.architecture`, but for Mixtral's and DeepSeek-V3's."""
