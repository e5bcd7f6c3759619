"""Defines Qwen3-Next: gated delta nets and gated attention, with mixtures of experts as feed-forward blocks."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.gated_delta_decoder import GatedDeltaLayer, GatedDeltaModel, parse_gated_delta_decoder
from mini_infer_engine.models.qwen3_moe import sparse_layers
from mini_infer_engine.models.sparse_decoder import SparseConfig, experts_per_token


class Qwen3NextLayer(GatedDeltaLayer):
    """A gated delta net whose checkpoint has the rows of each key head together."""

    by_key_head: ClassVar[bool] = True


class Qwen3NextForCausalLM(GatedDeltaModel):
    """Qwen3-Next (Qwen Team 2025, https://qwen.ai/blog?id=qwen3-next), without its multi-token prediction."""

    recurrent_layer_class: ClassVar[type[DecoderLayer]] = Qwen3NextLayer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        moe = parse_gated_moe(
            fields, num_experts=512, top_k=10, normalizes_top_k=fields.boolean("norm_topk_prob", True)
        )
        common = parse_gated_delta_decoder(fields, architecture, eos_token_ids)
        return SparseConfig(**common, moe=moe, sparse_layers=sparse_layers(fields))


def parse_gated_moe(fields: Fields, *, num_experts: int, top_k: int, normalizes_top_k: bool) -> MoESpec:
    """Returns the shape of a mixture with one shared expert that a gate weighs; the numbers are defaults."""
    num_experts = fields.size("num_experts", num_experts)
    top_k = experts_per_token(fields, top_k, num_experts, "num_experts")
    return MoESpec(
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("moe_intermediate_size", 512),
        num_experts=num_experts,
        top_k=top_k,
        normalizes_top_k=normalizes_top_k,
        gated_shared_size=fields.size("shared_expert_intermediate_size", 512),
    )
