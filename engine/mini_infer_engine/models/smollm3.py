"""Defines SmolLM3: Llama's decoder, of which every few layers have no position embeddings (NoPE)."""

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.config.model.rope import NO_ROTATION, parse_rope
from mini_infer_engine.models.decoder import DecoderModel

_DEFAULT_THETA = 2_000_000.0
_DEFAULT_INTERVAL = 4


class SmolLM3ForCausalLM(DecoderModel):
    """Llama's decoder with NoPE layers after Yang et al. 2025, arXiv 2501.18795."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. `no_rope_layers` has a 1 for each layer that rotates; the default is all but the last of
        every four.
        """
        num_layers = fields.size("num_hidden_layers")
        rotates = _rotates(fields, num_layers)
        rope = parse_rope(fields, fields.size("max_position_embeddings"), _DEFAULT_THETA)
        window = sliding_window(fields) if fields.boolean("use_sliding_window", False) else None
        otherwise = tuple(None if rotating else window for rotating in rotates)
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": fields.boolean("mlp_bias", False),
            "activation": parse_activation(fields),
            "ropes": tuple(rope if rotating else NO_ROTATION for rotating in rotates),
            "sliding_windows": windows_by_layer(fields, num_layers, window, otherwise),
            "default_tie": True,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))


def _rotates(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    layers = fields.values.get("no_rope_layers")
    if layers is None:
        interval = fields.size("no_rope_layer_interval", _DEFAULT_INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(layers, list) or len(layers) < num_layers or not set(layers) <= {0, 1}:
        raise fields.refuse("no_rope_layers", f"must be a list of {num_layers} ones (rotary) and zeros (NoPE).")
    return tuple(bool(one) for one in layers[:num_layers])
