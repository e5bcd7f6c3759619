"""Defines Seed-OSS: Llama's decoder with biases on q, k and v."""

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.models.decoder import DecoderModel


class SeedOssForCausalLM(DecoderModel):
    """Seed-OSS 36B (ByteDance Seed 2025)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config, which has a field for the bias of each product."""
        different = {
            "qkv_bias": fields.boolean("attention_bias", True),
            "output_bias": fields.boolean("attention_out_bias", False),
            "mlp_bias": fields.boolean("mlp_bias", False),
            "activation": parse_activation(fields),
            "default_head_dim": 128,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))
