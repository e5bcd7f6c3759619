"""Defines Qwen3: Qwen2's decoder without its biases, and with each head of q and k normalised before the rotation."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.models.qwen2 import qwen_windows

DEFAULT_HEAD_DIM = 128


class Qwen3Layer(DecoderLayer):
    """Llama's layer with q and k norms."""

    has_qk_norm: ClassVar[bool] = True


class Qwen3ForCausalLM(DecoderModel):
    """Llama's decoder with q and k norms (Yang et al. 2025, arXiv 2505.09388)."""

    layer_class: ClassVar[type[DecoderLayer]] = Qwen3Layer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Heads are 128 wide by default."""
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "sliding_windows": qwen_windows(fields),
            "activation": parse_activation(fields),
            "default_head_dim": DEFAULT_HEAD_DIM,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))
