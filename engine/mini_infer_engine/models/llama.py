"""Defines Llama 2 and 3: the plain decoder, with biases if the config has them."""

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """Grouped-query attention, SwiGLU, RMS norm before each block (Touvron et al. 2023, arXiv 2307.09288)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config, which has one field for biases of attention and one for those of the MLP."""
        bias = fields.boolean("attention_bias", False)
        different = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": fields.boolean("mlp_bias", False)}
        activation = parse_activation(fields)
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, activation=activation, **different))
