"""Defines GLM-4 9B of 2024: heads rotated in part, in neighbouring pairs, and gate and up in one tensor."""

from typing import Any, ClassVar

from torch import nn

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.config.model.rope import parse_partial_rope
from mini_infer_engine.layers.mlp import FusedGatedMLP
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel

_PARTIAL_ROTATION = 0.5
_DEFAULT_EPS = 1.5625e-7


class GlmLayer(DecoderLayer):
    """Llama's layer with gate and up in one tensor."""

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns the feed-forward block, with gate and up in one tensor."""
        del layer  # all are alike
        return FusedGatedMLP(config)


class GlmForCausalLM(DecoderModel):
    """GLM-4 9B (Team GLM 2024, arXiv 2406.12793)."""

    layer_class: ClassVar[type[DecoderLayer]] = GlmLayer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        return ModelConfig(**parse_glm(fields, architecture, eos_token_ids))


def parse_glm(fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Returns the arguments of the config, which the dense models of the family share."""
    rope = parse_partial_rope(fields, _PARTIAL_ROTATION, interleaved=True)
    different = {
        "qkv_bias": fields.boolean("attention_bias", True),
        "activation": parse_activation(fields),
        "ropes": (rope,) * fields.size("num_hidden_layers"),
        "default_head_dim": 128,
        "default_eps": _DEFAULT_EPS,
    }
    return parse_decoder(fields, architecture, eos_token_ids, **different)
