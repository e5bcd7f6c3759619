"""Qwen3-MoE: Qwen3's decoder whose feed-forward blocks, all or every few, are mixtures of experts."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from mini_infer_engine.config.fields import Fields
from mini_infer_engine.config.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.layers.moe import MoESpec, SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.models.qwen2 import qwen_windows
from mini_infer_engine.models.qwen3 import Qwen3Layer
from mini_infer_engine.ops.base import Ops, ResidualState


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """What a mixture adds."""

    moe: MoESpec
    sparse_layers: frozenset[int]
    """Layers with a mixture; the others have a plain MLP."""


class Qwen3MoeLayer(Qwen3Layer):
    """Qwen3's layer, with a mixture where the config says so."""

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """See `DecoderLayer.make_mlp`."""
        assert isinstance(config, Qwen3MoeConfig)
        return SparseMoE(config.moe) if layer in config.sparse_layers else GatedMLP(config)

    def feed_forward(self, ops: Ops, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """See `DecoderLayer.feed_forward`."""
        if isinstance(self.mlp, SparseMoE):
            return ops.moe_add_norm(state, self.post_attention_layernorm, self.mlp, next_norm)
        return super().feed_forward(ops, state, next_norm)


class Qwen3MoeForCausalLM(DecoderModel):
    """Qwen3's decoder with sparse feed-forward blocks (Yang et al. 2025, arXiv 2505.09388)."""

    layer_class: ClassVar[type[DecoderLayer]] = Qwen3MoeLayer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Defaults are transformers'."""
        num_layers, step = fields.size("num_hidden_layers"), fields.size("decoder_sparse_step", 1)
        # The hub's files say num_experts, those that transformers 5 writes num_local_experts.
        num_experts = fields.size("num_local_experts", fields.size("num_experts", 128))
        top_k = fields.size("num_experts_per_tok", 8)
        if top_k > num_experts:
            raise fields.refuse("num_experts_per_tok", f"must be at most num_experts = {num_experts}.")
        dense = fields.values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise fields.refuse("mlp_only_layers", "must be a list of layer numbers.")
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("moe_intermediate_size", 768),
            num_experts=num_experts,
            top_k=top_k,
            normalizes_top_k=fields.boolean("norm_topk_prob", False),
        )
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "sliding_windows": qwen_windows(fields),
            "activation": parse_activation(fields),
        }
        if fields.values.get("quantization_config") is not None:
            raise fields.refuse("quantization_config", "quantised experts are not supported; use the original weights.")
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        sparse = frozenset(range(step - 1, num_layers, step)) - set(dense)
        return Qwen3MoeConfig(**common, moe=moe, sparse_layers=sparse)
