"""Defines OLMo 3: OLMo 2's decoder with a window in three of four layers, which keep their rotation where others are
scaled.
"""

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder, windows_by_layer
from mini_infer_engine.config.model.rope import RopeParameters, parse_rope_object, rope_object
from mini_infer_engine.models.olmo2 import Olmo2ForCausalLM

_DEFAULT_THETA = 500_000.0
_DEFAULT_WINDOW = 4096
_INTERVAL = 4


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3 (OLMo Team 2025)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Without `layer_types` every fourth layer is full."""
        num_layers, window = fields.size("num_hidden_layers"), fields.size("sliding_window", _DEFAULT_WINDOW)
        otherwise = tuple(window if (layer + 1) % _INTERVAL else None for layer in range(num_layers))
        windows = windows_by_layer(fields, num_layers, window, otherwise)
        full, windowed = _ropes(fields)
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields),
            "sliding_windows": windows,
            "ropes": tuple(full if window is None else windowed for window in windows),
            "default_eps": 1e-5,
            "extends_context": False,  # max_position_embeddings has the factor already
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))


def _ropes(fields: Fields) -> tuple[RopeParameters, RopeParameters]:
    """Returns the rotations of full and of windowed layers: an object for each, or `rope_scaling` of the full ones."""
    longest = fields.size("max_position_embeddings")
    key, raw = rope_object(fields)
    if key == "rope_scaling":
        raw = {"full_attention": raw}
    objects = [raw.get(kind) or {} for kind in ("full_attention", "sliding_attention")]
    if not set(raw) <= {"full_attention", "sliding_attention"} or not all(isinstance(each, dict) for each in objects):
        raise fields.refuse(key, "must have an object for full_attention and one for sliding_attention.")
    full, windowed = (parse_rope_object(fields, key, each, longest, _DEFAULT_THETA) for each in objects)
    return full, windowed
