"""Defines dots.llm1: Qwen3's attention and DeepSeek-V3's mixtures of experts."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.deepseek_v2 import layer_number, moe_spec
from mini_infer_engine.models.qwen3_moe import Qwen3MoeLayer
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseModel

_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 62


class Dots1ForCausalLM(SparseModel):
    """dots.llm1 (rednote-hilab 2025, arXiv 2506.05767)."""

    layer_class: ClassVar[type[DecoderLayer]] = Qwen3MoeLayer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        if fields.values.get("scoring_func") not in (None, "sigmoid", "noaux_tc"):
            raise fields.refuse("scoring_func", "only sigmoid is supported for this architecture.")
        normalizes = fields.boolean("norm_topk_prob", False)
        moe = moe_spec(fields, in_groups=True, normalizes=normalizes, scoring="sigmoid", has_correction=True)
        num_layers = fields.size("num_hidden_layers")
        window = sliding_window(fields) if "sliding_window" in fields.values else _DEFAULT_WINDOW
        first = fields.optional_integer("max_window_layers")
        first = _DEFAULT_MAX_WINDOW_LAYERS if first is None else first
        otherwise = tuple(window if layer >= first else None for layer in range(num_layers))
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields),
            "sliding_windows": windows_by_layer(fields, num_layers, window, otherwise),
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        sparse = frozenset(range(layer_number(fields, "first_k_dense_replace"), num_layers))
        return SparseConfig(**common, moe=moe, sparse_layers=sparse)
