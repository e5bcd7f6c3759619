"""Defines Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v, and an optional window in its later layers."""

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.models.decoder import DecoderModel

_DEFAULT_MAX_WINDOW_LAYERS = 28


class Qwen2ForCausalLM(DecoderModel):
    """Llama's decoder with q, k and v biases (Yang et al. 2024, arXiv 2407.10671)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Biases have no field: every checkpoint has them."""
        different = {"qkv_bias": True, "sliding_windows": qwen_windows(fields), "activation": parse_activation(fields)}
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Returns the window of each layer: by `layer_types`, else the same for all layers from `max_window_layers` on."""
    num_layers = fields.size("num_hidden_layers")
    window = sliding_window(fields) if fields.boolean("use_sliding_window", False) else None
    configured = fields.optional_integer("max_window_layers")
    first = _DEFAULT_MAX_WINDOW_LAYERS if configured is None else configured  # 0: all layers have the window
    otherwise = tuple(window if layer >= first else None for layer in range(num_layers))
    return windows_by_layer(fields, num_layers, window, otherwise)
