"""Defines GLM-4 of 2025: GLM's decoder with norms also after attention and MLP."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel, OutputNormLayer
from mini_infer_engine.models.glm import GlmLayer, parse_glm


class Glm4Layer(OutputNormLayer, GlmLayer):
    """GLM's layer with norms before and after each block."""


class Glm4ForCausalLM(DecoderModel):
    """GLM-4-0414 9B and 32B and GLM-Z1 (Z.ai 2025)."""

    layer_class: ClassVar[type[DecoderLayer]] = Glm4Layer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".post_attention_layernorm.": ".post_self_attn_layernorm.",
        ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
        ".post_feedforward_layernorm.": ".post_mlp_layernorm.",
    }

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config as GLM's."""
        return ModelConfig(**parse_glm(fields, architecture, eos_token_ids))
