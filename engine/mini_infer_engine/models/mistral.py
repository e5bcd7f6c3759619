"""Defines Mistral: Llama's decoder with an optional sliding window in all layers."""

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder, sliding_window
from mini_infer_engine.models.decoder import DecoderModel

_DEFAULT_WINDOW = 4096


class MistralForCausalLM(DecoderModel):
    """Llama's decoder with sliding-window attention (Jiang et al. 2023, arXiv 2310.06825)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. As in transformers, a missing window is 4,096, and only an explicit null means none."""
        absent = "sliding_window" not in fields.values
        window = _DEFAULT_WINDOW if absent else sliding_window(fields)
        windows = (window,) * fields.size("num_hidden_layers")
        different = {"activation": parse_activation(fields), "sliding_windows": windows}
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))
