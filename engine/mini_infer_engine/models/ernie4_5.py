"""Defines ERNIE 4.5, dense: Llama's decoder whose heads are rotated in neighbouring pairs."""

from typing import Any

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.config.model.rope import parse_partial_rope
from mini_infer_engine.models.decoder import DecoderModel


class Ernie4_5ForCausalLM(DecoderModel):  # noqa: N801  # the name in config.json
    """ERNIE 4.5 0.3B (ERNIE Team 2025, ERNIE 4.5 Technical Report)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Heads are 128 wide by default."""
        return ModelConfig(**parse_ernie(fields, architecture, eos_token_ids, default_head_dim=128))


def parse_ernie(fields: Fields, architecture: str, eos_token_ids: tuple[int, ...], **different: Any) -> dict[str, Any]:
    """Returns the arguments of the config, which the family shares: one field is for all biases."""
    bias = fields.boolean("use_bias", False)
    common = {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "activation": parse_activation(fields),
        "ropes": (parse_partial_rope(fields, 1.0, interleaved=True),) * fields.size("num_hidden_layers"),
        "default_eps": 1e-5,
        "default_tie": True,
    }
    return parse_decoder(fields, architecture, eos_token_ids, **(common | different))
