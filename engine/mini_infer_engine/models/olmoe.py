"""Defines OLMoE: norms over all heads of q and of k, and a mixture of experts in every layer."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.olmo2 import AllHeadsNormLayer, Olmo2ForCausalLM
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, SparseModel, experts_per_token


class OlmoeLayer(AllHeadsNormLayer, SparseLayer):
    """Llama's layer with norms over all heads of q and of k, and a mixture."""


class OlmoeForCausalLM(SparseModel):
    """OLMoE (Muennighoff et al. 2024, arXiv 2409.02060)."""

    layer_class: ClassVar[type[DecoderLayer]] = OlmoeLayer
    checkpoint_names: ClassVar[dict[str, str]] = Olmo2ForCausalLM.checkpoint_names

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        if fields.values.get("clip_qkv") is not None:
            raise fields.refuse("clip_qkv", "it is not supported for this architecture.")
        num_layers, num_experts = fields.size("num_hidden_layers"), fields.size("num_experts", 64)
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_experts=num_experts,
            top_k=experts_per_token(fields, 8, num_experts, "num_experts"),
            normalizes_top_k=fields.boolean("norm_topk_prob", False),
        )
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields),
            "default_eps": 1e-5,
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        return SparseConfig(**common, moe=moe, sparse_layers=frozenset(range(num_layers)))
