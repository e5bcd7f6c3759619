"""Defines Qwen2-MoE: Qwen2's decoder with mixtures of experts, of which one computes every token behind a gate."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.qwen2 import qwen_windows
from mini_infer_engine.models.qwen3_moe import sparse_layers
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, SparseModel, experts_per_token


class Qwen2MoeForCausalLM(SparseModel):
    """Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al. 2024, arXiv 2407.10671)."""

    layer_class: ClassVar[type[DecoderLayer]] = SparseLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".shared_experts.": ".shared_expert.",
        ".shared_gate.": ".shared_expert_gate.",
    }

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        if fields.boolean("use_sliding_window", False) and fields.values.get("layer_types") is None:
            raise fields.refuse("use_sliding_window", "needs layer_types, which say which layers have the window.")
        num_experts = fields.size("num_local_experts", fields.size("num_experts", 60))
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("moe_intermediate_size", 1408),
            num_experts=num_experts,
            top_k=experts_per_token(fields, 4, num_experts, "num_experts"),
            normalizes_top_k=fields.boolean("norm_topk_prob", False),
            gated_shared_size=fields.size("shared_expert_intermediate_size", 5632),
        )
        different = {
            "qkv_bias": fields.boolean("qkv_bias", True),
            "sliding_windows": qwen_windows(fields),
            "activation": parse_activation(fields),
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        return SparseConfig(**common, moe=moe, sparse_layers=sparse_layers(fields))
