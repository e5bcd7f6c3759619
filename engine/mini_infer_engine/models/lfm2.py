"""Defines LFM2: Qwen3's attention in some layers, and gated short convolutions in the others."""

from typing import Any, ClassVar

from torch import Tensor

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_decoder
from mini_infer_engine.config.model.recurrence import Mixer, ShortConvolutionSpec, mixers_by_layer
from mini_infer_engine.config.model.rope import parse_rope
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.layers.short_convolution import ShortConvolution
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.qwen3 import Qwen3Layer
from mini_infer_engine.models.recurrent_decoder import HybridModel, RecurrentLayer
from mini_infer_engine.ops.base import Ops, RecurrentPass, ResidualState

_KINDS: dict[str, Mixer] = {"conv": "recurrent", "linear_attention": "recurrent", "full_attention": "attention"}
_DEFAULT_THETA = 1_000_000.0
_DEFAULT_EPS = 1e-5


class Lfm2Layer(RecurrentLayer):
    """A layer with a gated short convolution."""

    def make_recurrence(self, config: ModelConfig, layer: int) -> RecurrentBlock:
        """Returns the convolution of this layer."""
        assert isinstance(config.recurrence, ShortConvolutionSpec)
        return ShortConvolution(config, layer, config.recurrence)

    def mix(self, ops: Ops, state: ResidualState, recurrent: RecurrentPass) -> Tensor:
        """Projects, gates the input, convolves it, and gates the output."""
        assert isinstance(self.recurrence, ShortConvolution)
        projected = ops.norm_linear(state, self.input_layernorm, self.recurrence.in_proj)
        return recurrent.short_convolution(projected, self.recurrence)


class Lfm2ForCausalLM(HybridModel):
    """LFM2 with plain MLPs (Liquid AI 2025, arXiv 2511.23404)."""

    layer_class: ClassVar[type[DecoderLayer]] = Qwen3Layer
    recurrent_layer_class: ClassVar[type[DecoderLayer]] = Lfm2Layer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".recurrence.conv1d.": ".conv.conv.",
        ".recurrence.": ".conv.",
        "model.norm.": "model.embedding_norm.",
        ".input_layernorm.": ".operator_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".o_proj.": ".out_proj.",
        ".q_norm.": ".q_layernorm.",
        ".k_norm.": ".k_layernorm.",
        ".mlp.gate_proj.": ".feed_forward.w1.",
        ".mlp.up_proj.": ".feed_forward.w3.",
        ".mlp.down_proj.": ".feed_forward.w2.",
    }

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        return ModelConfig(
            **parse_lfm2(fields, architecture, eos_token_ids, intermediate_size=_intermediate_size(fields))
        )


def parse_lfm2(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...], *, intermediate_size: int
) -> dict[str, Any]:
    """Returns the arguments of the config, for MLPs of this width; older files have names of their own for some
    fields.
    """
    num_layers = fields.size("num_hidden_layers")
    attending = fields.values.get("full_attn_idxs")
    attending = range(num_layers) if attending is None else attending
    if not isinstance(attending, list | range):
        raise fields.refuse("full_attn_idxs", "must be a list of layer numbers.")
    otherwise = ["full_attention" if layer in attending else "conv" for layer in range(num_layers)]
    rope = parse_rope(fields, fields.size("max_position_embeddings", 128_000), _DEFAULT_THETA)
    width, bias = fields.size("hidden_size"), fields.boolean("conv_bias", False)
    different: dict[str, Any] = {
        "intermediate_size": intermediate_size,
        "ropes": (rope,) * num_layers,
        "tie_word_embeddings": fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings", True)),
        "mixers": mixers_by_layer(fields, num_layers, _KINDS, otherwise),
        "recurrence": ShortConvolutionSpec(width, fields.size("conv_L_cache", 3), bias=bias),
    }
    named = {
        "rms_norm_eps": fields.number("norm_eps", _DEFAULT_EPS),
        "intermediate_size": intermediate_size,
        "max_position_embeddings": fields.size("max_position_embeddings", 128_000),
    }
    return parse_decoder(Fields(fields.path, {**fields.values, **named}), architecture, eos_token_ids, **different)


def _intermediate_size(fields: Fields) -> int:
    """Returns the width of the MLPs: the file's, or two thirds of it times a factor, rounded up to a multiple."""
    size = fields.size("block_ff_dim", fields.size("intermediate_size", 12_288))
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    step = fields.size("block_multiple_of", 256)
    scaled = int(fields.positive("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return step * -(-scaled // step)
