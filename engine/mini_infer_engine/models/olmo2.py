"""Defines OLMo 2: norms after attention and MLP instead of before them, and norms over all heads of q and of k."""

from typing import ClassVar

from torch import Tensor

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.layers.head_order import head_order
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel, OutputNormLayer
from mini_infer_engine.ops.base import Ops, ResidualState


class AllHeadsNormLayer(DecoderLayer):
    """A decoder layer with a norm over all heads of q together, and one over all heads of k."""

    def add_mixer(self, config: ModelConfig, layer: int) -> None:
        """Adds attention and the two norms.

        They are not the attention's: its norms are over each head by itself, and are fused with the rotation.
        """
        super().add_mixer(config, layer)
        order = head_order(self.self_attn.rope, config.head_dim)
        self.q_norm = RMSNorm.of_heads(config, config.num_heads, order=order)
        self.k_norm = RMSNorm.of_heads(config, config.num_kv_heads, order=order)

    def project(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns q, k and v, with q and k normalised over all their heads."""
        qkv = super().project(ops, state)
        q_width, kv_width = self.q_norm.weight.shape[0], self.k_norm.weight.shape[0]
        ops.norm_columns_(qkv, slice(0, q_width), self.q_norm)
        ops.norm_columns_(qkv, slice(q_width, q_width + kv_width), self.k_norm)
        return qkv


class Olmo2Layer(AllHeadsNormLayer, OutputNormLayer):
    """A layer with a norm after attention and after MLP, and none before them."""

    has_input_norm: ClassVar[bool] = False
    has_feedforward_norm: ClassVar[bool] = False


class Olmo2ForCausalLM(DecoderModel):
    """OLMo 2 (OLMo Team 2024, arXiv 2501.00656)."""

    layer_class: ClassVar[type[DecoderLayer]] = Olmo2Layer
    checkpoint_names: ClassVar[dict[str, str]] = {".q_norm.": ".self_attn.q_norm.", ".k_norm.": ".self_attn.k_norm."}

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config, which has one field for biases of attention."""
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields),
            "default_eps": 1e-5,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))
