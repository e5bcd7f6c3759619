"""Defines Gemma 2: norms before and after each block, GELU, soft-capped scores and logits, half the layers windowed."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel, OutputNormLayer

_DEFAULT_HEAD_DIM = 256
_DEFAULT_WINDOW = 4096
_ATTENTION_SOFTCAP, _LOGITS_SOFTCAP = 50.0, 30.0


class Gemma2ForCausalLM(DecoderModel):
    """Gemma 2 (Gemma Team 2024, arXiv 2408.00118)."""

    layer_class: ClassVar[type[DecoderLayer]] = OutputNormLayer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Without `layer_types` the first layer of each two is windowed; an explicit null means no
        soft cap.
        """
        if fields.values.get("use_bidirectional_attention"):
            raise fields.refuse("use_bidirectional_attention", "it is not supported for this architecture.")
        num_layers = fields.size("num_hidden_layers")
        absent = "sliding_window" not in fields.values
        window = _DEFAULT_WINDOW if absent else sliding_window(fields)
        otherwise = tuple(None if layer % 2 else window for layer in range(num_layers))
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields, "hidden_activation", "gelu_tanh"),
            "sliding_windows": windows_by_layer(fields, num_layers, window, otherwise),
            "attention_scale": fields.positive("query_pre_attn_scalar", _DEFAULT_HEAD_DIM) ** -0.5,
            "attention_softcap": softcap(fields, "attn_logit_softcapping", _ATTENTION_SOFTCAP),
            "logits_softcap": softcap(fields, "final_logit_softcapping", _LOGITS_SOFTCAP),
            "embedding_scale": fields.size("hidden_size") ** 0.5,
            "norm_offset": 1.0,
            "default_head_dim": _DEFAULT_HEAD_DIM,
            "default_tie": True,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))


def softcap(fields: Fields, key: str, default: float | None) -> float | None:
    """Reads a positive number; null means none, and an absent field `default`."""
    value = fields.optional_number(key) if key in fields.values else default
    if value is not None and value <= 0:
        raise fields.refuse(key, "must be a positive number, or null for none.")
    return value
