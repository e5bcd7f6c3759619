"""Defines Gemma 4 Unified (text), the 12B model: Gemma 4's dense decoder with other defaults."""

from collections.abc import Mapping
from typing import Any

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.gemma4 import Gemma4ForCausalLM
from mini_infer_engine.models.gemma4_config import parse_gemma4

_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The text model of Gemma 4 12B (Google DeepMind 2026), without inputs of layers and experts."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        return parse_gemma4(Fields(fields.path, {**_DEFAULTS, **fields.values}), architecture, eos_token_ids)
