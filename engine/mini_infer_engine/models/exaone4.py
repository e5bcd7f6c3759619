"""Defines EXAONE 4: norms after attention and MLP alone, q and k norms, and no rotation in layers without a window."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.config.model.rope import NO_ROTATION, parse_rope
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel, OutputNormLayer

_DEFAULT_WINDOW = 4096
_DEFAULT_PATTERN = 4


class Exaone4Layer(OutputNormLayer):
    """A layer with q and k norms, and with a norm after attention and after MLP, but none before them."""

    has_input_norm: ClassVar[bool] = False
    has_feedforward_norm: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = True


class Exaone4ForCausalLM(DecoderModel):
    """EXAONE 4.0 (LG AI Research 2025, arXiv 2507.11407)."""

    layer_class: ClassVar[type[DecoderLayer]] = Exaone4Layer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. A null window means that all layers are full, and rotate."""
        num_layers = fields.size("num_hidden_layers")
        window = sliding_window(fields) if "sliding_window" in fields.values else _DEFAULT_WINDOW
        windows: tuple[int | None, ...] = (None,) * num_layers
        if window is not None:
            otherwise = windows
            if fields.values.get("layer_types") is None:
                pattern = fields.size("sliding_window_pattern", _DEFAULT_PATTERN)
                otherwise = tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
            windows = windows_by_layer(fields, num_layers, window, otherwise)
        rope = parse_rope(fields, fields.size("max_position_embeddings"))
        different = {
            "activation": parse_activation(fields),
            "sliding_windows": windows,
            "ropes": tuple(rope if window is None or each is not None else NO_ROTATION for each in windows),
            "default_eps": 1e-5,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))
