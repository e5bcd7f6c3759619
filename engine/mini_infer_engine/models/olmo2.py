"""OLMo 2: blocks read the residual stream as it is, and what they add is normalised; so are q and k, over all heads."""

from typing import ClassVar

from torch import Tensor

from mini_infer_engine.config.fields import Fields
from mini_infer_engine.config.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState


class Olmo2Layer(DecoderLayer):
    """Attention and MLP without a norm before them, and with one behind each."""

    has_input_norm: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.post_feedforward_layernorm = RMSNorm.of(config)
        # Not the attention's: what norms each head by itself is another thing, and rides along with the rotation.
        self.q_norm = RMSNorm.of(config, config.num_heads * config.head_dim)
        self.k_norm = RMSNorm.of(config, config.num_kv_heads * config.head_dim)

    def project(self, ops: Ops, state: ResidualState) -> Tensor:
        """See `DecoderLayer.project`."""
        qkv = super().project(ops, state)
        q_width, kv_width = self.q_norm.weight.shape[0], self.k_norm.weight.shape[0]
        ops.norm_columns_(qkv, slice(0, q_width), self.q_norm)
        ops.norm_columns_(qkv, slice(q_width, q_width + kv_width), self.k_norm)
        return qkv

    def forward(
        self, ops: Ops, state: ResidualState, attention: AttentionPass, next_norm: RMSNorm | None
    ) -> ResidualState:
        """See `DecoderLayer.forward`."""
        mixed, state = self.attend(ops, state, attention)
        if not mixed.shape[0]:
            return state
        state = ops.linear_norm_add_norm(mixed, self.self_attn.o_proj, self.post_attention_layernorm, state, None)
        assert isinstance(self.mlp, GatedMLP)
        gated = ops.norm_gated_linear(state, None, self.mlp.gate_up_proj, self.mlp.activation)
        return ops.linear_norm_add_norm(gated, self.mlp.down_proj, self.post_feedforward_layernorm, state, next_norm)


class Olmo2ForCausalLM(DecoderModel):
    """OLMo 2 (OLMo Team 2024, arXiv 2501.00656)."""

    layer_class: ClassVar[type[DecoderLayer]] = Olmo2Layer
    checkpoint_names: ClassVar[dict[str, str]] = {".q_norm.": ".self_attn.q_norm.", ".k_norm.": ".self_attn.k_norm."}

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Biases of attention are a field of their own."""
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields),
            "default_eps": 1e-5,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))
