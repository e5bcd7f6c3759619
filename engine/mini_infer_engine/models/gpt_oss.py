"""Defines gpt-oss: attention sinks, a window in every other layer, and experts with biases and a clamped SwiGLU."""

from typing import Any, ClassVar

from torch import nn

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.config.model.rope import parse_rope
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.layers.stacked_moe import StackedMoE
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, SparseModel, experts_per_token

_DEFAULT_THETA = 150_000.0
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
}
"""The defaults of transformers, which are those of gpt-oss-120b."""
_DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssLayer(SparseLayer):
    """Llama's layer, with a mixture that its checkpoint stores as stacks."""

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns the mixture: every layer has one."""
        del layer
        assert isinstance(config, SparseConfig)
        return StackedMoE(config.moe, config.tensor_parallel)


class GptOssForCausalLM(SparseModel):
    """OpenAI's open-weight mixtures of experts (gpt-oss-120b & gpt-oss-20b Model Card 2025, arXiv 2508.10925)."""

    layer_class: ClassVar[type[DecoderLayer]] = GptOssLayer
    checkpoint_names: ClassVar[dict[str, str]] = {".mlp.gate.": ".mlp.router."}
    stop_tokens: ClassVar[tuple[str, ...]] = ("<|return|>", "<|call|>")

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Without `layer_types` the first layer of each two has the window.

        The router's softmax over the chosen experts is that over all of them, divided by the chosen ones' sum.
        """
        values = _DEFAULTS | dict(fields.values)
        if not values.get("rope_scaling") and not values.get("rope_parameters"):
            values["rope_parameters"] = _DEFAULT_ROPE
        fields = Fields(fields.path, values)
        num_layers, num_experts = fields.size("num_hidden_layers"), fields.size("num_local_experts", 128)
        top_k = experts_per_token(fields, 4, num_experts, "num_local_experts")
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_experts=num_experts,
            top_k=top_k,
            normalizes_top_k=True,
            has_bias=True,
            swiglu_limit=fields.positive("swiglu_limit", 7.0),
        )
        window = sliding_window(fields)
        otherwise = tuple(None if layer % 2 else window for layer in range(num_layers))
        bias = fields.boolean("attention_bias", True)
        rope = parse_rope(fields, fields.size("max_position_embeddings"), _DEFAULT_THETA)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "activation": parse_activation(fields),
            "attention_sinks": True,
            "sliding_windows": windows_by_layer(fields, num_layers, window, otherwise),
            "ropes": (rope,) * num_layers,
            "default_eps": 1e-5,
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        return SparseConfig(**common, moe=moe, sparse_layers=frozenset(range(num_layers)))
