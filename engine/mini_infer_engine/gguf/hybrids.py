"""Translates GGUF's architectures with recurrent layers. It knows no file. No torch."""

from collections.abc import Mapping
from typing import Any

from mini_infer_engine.gguf.dense import LLAMA_BLOCK, granite
from mini_infer_engine.gguf.experts import EXPERTS_BLOCK
from mini_infer_engine.gguf.translation import EXPERT, OUTSIDE, Architecture, Change, Fusion, Metadata

_MAMBA: Mapping[str, Change] = {
    "ssm_a": "logarithm",
    "ssm_d": "flat",
    "ssm_norm.weight": "flat",
    "ssm_conv1d.weight": "channels",
}


def _mamba_block(path: str) -> dict[str, str]:
    """Returns the names of a Mamba-2 block."""
    return {
        "ssm_in": f"{path}.in_proj",
        "ssm_conv1d": f"{path}.conv1d",
        "ssm_dt.bias": f"{path}.dt_bias",
        "ssm_a": f"{path}.A_log",
        "ssm_d": f"{path}.D",
        "ssm_norm": f"{path}.norm",
        "ssm_out": f"{path}.out_proj",
    }


_GRANITE_BLOCK = (
    LLAMA_BLOCK
    | _mamba_block("mamba")
    | {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
        "ffn_down": "shared_mlp.output_linear",
    }
)
_GRANITE_FUSIONS = (
    Fusion("block_sparse_moe.input_linear.weight", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "stacked_rows"),
    Fusion("shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "stacked_rows"),
    Fusion("shared_mlp.input_linear.weight", ("ffn_gate.weight", "ffn_up.weight"), "stacked_rows"),
)
_NEMOTRON_BLOCK = _mamba_block("mixer") | {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": f"mixer.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mixer.experts.{EXPERT}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NEMOTRON_OUTSIDE = {
    "token_embd.weight": "model.embeddings.weight",
    "output_norm.weight": "model.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_LFM2_BLOCK = LLAMA_BLOCK | {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": f"feed_forward.experts.{EXPERT}.w1",
    "ffn_down_exps": f"feed_forward.experts.{EXPERT}.w2",
    "ffn_up_exps": f"feed_forward.experts.{EXPERT}.w3",
}
_LFM2_OUTSIDE = OUTSIDE | {
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output_norm.weight": "model.embedding_norm.weight",
}
_DELTA_BLOCK = (
    LLAMA_BLOCK
    | EXPERTS_BLOCK
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
_DELTA_CHANGES: Mapping[str, Change] = {
    "ssm_a": "logarithm",
    "ssm_conv1d.weight": "channels",
    "ffn_gate_inp_shexp.weight": "row",
}
_QWEN3_NEXT_FUSIONS = (
    Fusion("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), "grouped_heads"),
    Fusion("linear_attn.in_proj_qkvz.weight", ("ssm_in.weight",), "none"),  # files of before they were split
)
_QWEN3_5_BLOCK = _DELTA_BLOCK | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_QWEN3_5_CHANGES: Mapping[str, Change] = {
    "attn_qkv.weight": "tiled_values",
    "attn_gate.weight": "tiled_rows",
    "ssm_alpha.weight": "tiled_heads",
    "ssm_beta.weight": "tiled_heads",
    "ssm_dt.bias": "tiled_heads",
    "ssm_a": "tiled_logarithm",
    "ssm_out.weight": "tiled_columns",
    "ssm_conv1d.weight": "tiled_channels",
    "ffn_gate_inp_shexp.weight": "row",
}
_LINEAR_NORM = ("ssm_norm.weight",)


def _granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    attends = metadata.in_layers("attention.head_count_kv")
    width, heads = metadata.need("ssm.inner_size"), metadata.need("ssm.time_step_rank")
    experts = metadata.get("expert_count", 0)
    shared = metadata.get("expert_shared_feed_forward_length") if experts else metadata.width("feed_forward_length")
    return granite(metadata) | {
        "layer_types": ["attention" if each else "mamba" for each in attends],
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_expand": width // metadata.need("embedding_length"),
        "mamba_d_state": metadata.need("ssm.state_size"),
        "mamba_n_groups": metadata.need("ssm.group_count"),
        "mamba_d_conv": metadata.need("ssm.conv_kernel"),
        "mamba_conv_bias": _has(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(metadata, "ssm_in.bias"),
        "attention_bias": _has(metadata, "attn_q.bias"),
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.get("expert_used_count", 0),
        "shared_intermediate_size": shared,
    }


def _nemotron(metadata: Metadata) -> dict[str, Any]:
    attends, computes = metadata.in_layers("attention.head_count_kv"), metadata.in_layers("feed_forward_length")
    kinds = []
    for layer, (has_keys, has_width) in enumerate(zip(attends, computes, strict=True)):
        if has_keys:
            kinds.append("attention")
        elif metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight"):
            kinds.append("moe")
        else:
            kinds.append("mlp" if has_width else "mamba")
    width, heads = metadata.need("ssm.inner_size"), metadata.need("ssm.time_step_rank")
    fields = {
        "layers_block_type": kinds,
        "layer_norm_epsilon": metadata.need("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": width // heads,
        "ssm_state_size": metadata.need("ssm.state_size"),
        "n_groups": metadata.need("ssm.group_count"),
        "conv_kernel": metadata.need("ssm.conv_kernel"),
        "use_conv_bias": _has(metadata, "ssm_conv1d.bias"),
        "use_bias": _has(metadata, "ssm_in.bias"),
        "mlp_bias": _has(metadata, "ffn_up.bias"),
    }
    if "moe" not in kinds:
        return fields
    return fields | {
        "n_routed_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "n_shared_experts": metadata.get("expert_shared_count", 1),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.get("moe_latent_size"),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
    }


def _lfm2(metadata: Metadata) -> dict[str, Any]:
    attends = metadata.in_layers("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": metadata.need("shortconv.l_cache"),
        "conv_bias": _has(metadata, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
    }


def _lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    return _lfm2(metadata) | {
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "use_expert_bias": _has(metadata, "exp_probs_b.bias"),
    }


def _delta(metadata: Metadata) -> dict[str, Any]:
    """Returns the fields of a gated delta net between layers of attention."""
    heads = metadata.need("ssm.time_step_rank")
    head_dim, rotated = metadata.need("attention.key_length"), metadata.need("rope.dimension_count")
    return {
        "full_attention_interval": metadata.get("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.need("ssm.inner_size") // heads,
        "partial_rotary_factor": rotated / head_dim,
    }


def _delta_moe(metadata: Metadata) -> dict[str, Any]:
    return _delta(metadata) | {
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _has(metadata: Metadata, name: str) -> bool:
    """Returns True if some layer has a tensor of this name."""
    return any(theirs.endswith(f".{name}") for theirs in metadata.header.tensors)


HYBRIDS = {
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _granite_hybrid,
        _GRANITE_BLOCK,
        interleaves=True,
        changes=_MAMBA,
        fusions=_GRANITE_FUSIONS,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        _lfm2,
        _LFM2_BLOCK,
        changes={"shortconv.conv.weight": "channels"},
        outside=_LFM2_OUTSIDE,
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        _lfm2_moe,
        _LFM2_BLOCK,
        changes={"shortconv.conv.weight": "channels"},
        outside=_LFM2_OUTSIDE,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        _nemotron,
        _NEMOTRON_BLOCK,
        rotates_apart=True,
        changes=_MAMBA,
        outside=_NEMOTRON_OUTSIDE,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        _nemotron,
        _NEMOTRON_BLOCK,
        rotates_apart=True,
        changes=_MAMBA,
        outside=_NEMOTRON_OUTSIDE,
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        _delta,
        _QWEN3_5_BLOCK,
        offsets_norms=True,
        norms_kept=_LINEAR_NORM,
        rotates_partly=True,
        changes=_QWEN3_5_CHANGES,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        _delta_moe,
        _QWEN3_5_BLOCK,
        offsets_norms=True,
        norms_kept=_LINEAR_NORM,
        rotates_partly=True,
        changes=_QWEN3_5_CHANGES,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        _delta_moe,
        _DELTA_BLOCK,
        offsets_norms=True,
        norms_kept=_LINEAR_NORM,
        rotates_partly=True,
        changes=_DELTA_CHANGES,
        fusions=_QWEN3_NEXT_FUSIONS,
    ),
}
"""Translations by `general.architecture`."""
