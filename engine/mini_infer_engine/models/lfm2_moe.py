"""Defines LFM2 with mixtures of experts in all but the first layers."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.lfm2 import Lfm2ForCausalLM, Lfm2Layer, parse_lfm2
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, experts_per_token


class Lfm2MoeAttentionLayer(SparseLayer):
    """A layer with Qwen3's attention."""

    has_qk_norm: ClassVar[bool] = True


class Lfm2MoeLayer(Lfm2Layer, SparseLayer):
    """A layer with a gated short convolution."""


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts, such as LFM2-8B-A1B (Liquid AI 2025, arXiv 2511.23404)."""

    layer_class: ClassVar[type[DecoderLayer]] = Lfm2MoeAttentionLayer
    recurrent_layer_class: ClassVar[type[DecoderLayer]] = Lfm2MoeLayer
    checkpoint_names: ClassVar[dict[str, str]] = Lfm2ForCausalLM.checkpoint_names | {
        ".mlp.gate.e_score_correction_bias.": ".feed_forward.expert_bias.",
        ".mlp.": ".feed_forward.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    }

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        num_experts = fields.size("num_experts", 32)
        top_k = experts_per_token(fields, 4, num_experts, "num_experts")
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("moe_intermediate_size", 1792),
            num_experts=num_experts,
            top_k=top_k,
            normalizes_top_k=fields.boolean("norm_topk_prob", True),
            scoring="sigmoid",
            scale=fields.number("routed_scaling_factor", 1.0),
            has_correction=fields.boolean("use_expert_bias", True),
        )
        num_dense = fields.optional_integer("num_dense_layers")
        if num_dense is not None and num_dense < 0:
            raise fields.refuse("num_dense_layers", "must not be negative.")
        width = fields.size("intermediate_size", 7168)
        common = parse_lfm2(fields, architecture, eos_token_ids, intermediate_size=width)
        sparse = frozenset(range(2 if num_dense is None else num_dense, common["num_layers"]))
        return SparseConfig(**common, moe=moe, sparse_layers=sparse)
