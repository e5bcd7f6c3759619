"""Defines Granite 3 (dense): Llama's decoder with multipliers of embeddings, scores, residual sums and logits."""

from typing import Any, ClassVar

from torch import Tensor

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel


class GraniteForCausalLM(DecoderModel):
    """Llama's decoder with the multipliers of maximal update parametrisation (Yang et al. 2022, arXiv 2203.03466)."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config and its multipliers."""
        different = granite_fields(fields) | {"mlp_bias": fields.boolean("mlp_bias", False)}
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        return ModelConfig(**scaled_to_residual(fields, common))

    def scale_embeddings(self, hidden: Tensor) -> Tensor:
        """Multiplies by the embedding scale, which is not rounded to the model's dtype as Gemma's is."""
        return hidden.mul_(self.config.embedding_scale)


def granite_fields(fields: Fields) -> dict[str, Any]:
    """Returns the arguments of the config that Granite's multipliers change."""
    bias = fields.boolean("attention_bias", False)
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": parse_activation(fields),
        "attention_scale": fields.positive("attention_multiplier", 1.0),
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "logits_divisor": fields.positive("logits_scaling", 1.0),
    }


def scaled_to_residual(fields: Fields, arguments: dict[str, Any]) -> dict[str, Any]:
    """Divides the residual stream by `residual_multiplier`, so that blocks are added without a factor.

    Only norms read the residual stream. x / rms(x) does not change with the scale of x, except for its epsilon, which
    is divided by the multiplier's square.
    """
    multiplier = fields.positive("residual_multiplier", 1.0)
    scaled = {
        "embedding_scale": arguments["embedding_scale"] / multiplier,
        "rms_norm_eps": arguments["rms_norm_eps"] / multiplier**2,
    }
    return arguments | scaled
