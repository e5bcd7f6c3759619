"""Defines Gemma 3 (text).

It has norms before and after each block, GELU, scaled embeddings, and five windowed layers to each full one.
"""

from typing import Any, ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.config.model.rope import RopeParameters, parse_rope_object, rope_object
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel, OutputNormLayer

_DEFAULT_HEAD_DIM = 256
_DEFAULT_PATTERN = 6
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
"""The defaults of transformers: files of the larger models, whose text part is `text_config`, omit equal values."""
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3Layer(OutputNormLayer):
    """Gemma 2's layer with q and k norms."""

    has_qk_norm: ClassVar[bool] = True


class Gemma3ForCausalLM(DecoderModel):
    """The text model of Gemma 3 (Gemma Team 2025, arXiv 2503.19786)."""

    layer_class: ClassVar[type[DecoderLayer]] = Gemma3Layer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads windows and rotations by layer; refuses fields that only Gemma 2 has."""
        fields = Fields(fields.path, _DEFAULTS | dict(fields.values))
        for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
            if fields.values.get(name):
                raise fields.refuse(name, "it is not supported for this architecture.")
        num_layers = fields.size("num_hidden_layers")
        windows = _windows(fields, num_layers)
        global_rope, local_rope = _ropes(fields)
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields, "hidden_activation", "gelu_tanh"),
            "sliding_windows": windows,
            "ropes": tuple(global_rope if window is None else local_rope for window in windows),
            "attention_scale": fields.positive("query_pre_attn_scalar", _DEFAULT_HEAD_DIM) ** -0.5,
            "embedding_scale": fields.size("hidden_size") ** 0.5,
            "norm_offset": 1.0,
            "default_head_dim": _DEFAULT_HEAD_DIM,
            "default_tie": True,
            "extends_context": False,  # max_position_embeddings has the factor already
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window, by `layer_types` or by older files' pattern: the last layer of each group is not
    windowed.
    """
    window = sliding_window(fields)
    pattern = fields.size("sliding_window_pattern", _DEFAULT_PATTERN)
    otherwise = tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    return windows_by_layer(fields, num_layers, window, otherwise)


def _ropes(fields: Fields) -> tuple[RopeParameters, RopeParameters]:
    """Returns the rotations of full and of windowed layers: an object for each, or older files' two frequencies."""
    longest = fields.size("max_position_embeddings")
    key, raw = rope_object(fields)
    if any(isinstance(value, dict) for value in raw.values()):
        kinds = (raw.get("full_attention") or {}, raw.get("sliding_attention") or {})
        thetas = (_GLOBAL_THETA, _LOCAL_THETA)
        full, windowed = (
            parse_rope_object(fields, key, kind, longest, theta) for kind, theta in zip(kinds, thetas, strict=True)
        )
        return full, windowed
    local = RopeParameters(
        theta=fields.number("rope_local_base_freq", _LOCAL_THETA), original_max_position_embeddings=longest
    )
    return parse_rope_object(fields, key, raw, longest, _GLOBAL_THETA), local
