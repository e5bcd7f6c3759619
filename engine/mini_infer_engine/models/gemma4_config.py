"""Reads Gemma 4's config: the heads, windows and rotations of its layers, and which layers share keys and values."""

from dataclasses import dataclass
from typing import Any

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import (
    HeadShape,
    ModelConfig,
    parse_activation,
    parse_decoder,
    sliding_window,
    windows_by_layer,
)
from mini_infer_engine.config.model.rope import RopeParameters, parse_rope_object, rope_object
from mini_infer_engine.layers.moe import MoESpec

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
"""The defaults of transformers, which files omit."""
_PATTERN = 6
_GLOBAL_ROPE: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
_LOCAL_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """A `ModelConfig` with what Gemma 4 adds."""

    layer_input_size: int
    """The width of each layer's own input; 0: there is none."""
    layer_input_vocab_size: int
    """The rows of the table of these inputs."""
    values_are_keys: bool
    """True if full layers have no product for values: they are the keys before their norm."""
    widens_mlp: bool
    """True if the MLP is twice as wide in layers that share keys and values."""
    moe: MoESpec | None
    """The experts beside each MLP; None: there are none."""

    @property
    def needs_token_ids(self) -> bool:
        """True if layers have inputs of their own."""
        return self.layer_input_size > 0


def parse_gemma4(fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> Gemma4Config:
    """Reads the config. Raises ModelError if it asks for something that is not computed here."""
    fields = Fields(fields.path, _DEFAULTS | {key: value for key, value in fields.values.items() if value is not None})
    if fields.values.get("quantization_config") is not None:
        raise fields.refuse("quantization_config", "only original weights of this architecture are supported yet.")
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.refuse("use_bidirectional_attention", "tokens that see what comes after them are not supported.")
    num_layers = fields.size("num_hidden_layers")
    windows = _windows(fields, num_layers)
    sources = _kv_sources(fields, windows)
    values_are_keys = fields.boolean("attention_k_eq_v", False)
    width = _count(fields, "hidden_size_per_layer_input")
    rows = fields.size("vocab_size_per_layer_input", 262_144)
    if width and rows < fields.size("vocab_size"):
        raise fields.refuse("vocab_size_per_layer_input", "must be at least vocab_size.")
    bias = fields.boolean("attention_bias", False)
    softcap = fields.values.get("final_logit_softcapping")
    global_rope, local_rope = _ropes(fields)
    different = {
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": parse_activation(fields, "hidden_activation", "gelu_tanh"),
        "sliding_windows": windows,
        "ropes": tuple(global_rope if window is None else local_rope for window in windows),
        "head_shapes": _head_shapes(fields, windows, values_are_keys=values_are_keys),
        "kv_sources": sources,
        "attention_scale": 1.0,
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "logits_softcap": None if softcap is None else fields.positive("final_logit_softcapping"),
        "default_tie": True,
        "extends_context": False,
    }
    return Gemma4Config(
        **parse_decoder(fields, architecture, eos_token_ids, **different),
        layer_input_size=width,
        layer_input_vocab_size=rows,
        values_are_keys=values_are_keys,
        widens_mlp=fields.boolean("use_double_wide_mlp", False),
        moe=_moe(fields) if fields.boolean("enable_moe_block", False) else None,
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window: without `layer_types` five of six have one, and the last layer never has."""
    window = sliding_window(fields)
    otherwise = tuple(window if (layer + 1) % _PATTERN else None for layer in range(num_layers))
    return (*windows_by_layer(fields, num_layers, window, otherwise)[:-1], None)


def _kv_sources(fields: Fields, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """Returns the layer whose keys and values each layer reads: of the last `num_kv_shared_layers` that of the last
    layer before them of the same kind.
    """
    num_layers, shared = len(windows), _count(fields, "num_kv_shared_layers")
    own = num_layers - shared
    if own < 1:
        raise fields.refuse("num_kv_shared_layers", f"must be below num_hidden_layers = {num_layers}.")
    last = {window is None: layer for layer, window in enumerate(windows[:own])}
    if any((window is None) not in last for window in windows[own:]):
        raise fields.refuse("num_kv_shared_layers", "leaves no layer of each kind with keys and values of its own.")
    return (*range(own), *(last[window is None] for window in windows[own:]))


def _head_shapes(fields: Fields, windows: tuple[int | None, ...], *, values_are_keys: bool) -> tuple[HeadShape, ...]:
    """Returns the KV heads of each layer, by transformers' `per_layer_config` or the fields of published files."""
    local = HeadShape(fields.size("num_key_value_heads"), fields.size("head_dim"))
    by_layer = fields.values.get("per_layer_config")
    full = HeadShape(local.num_kv_heads, fields.size("global_head_dim"))
    if values_are_keys:
        full = HeadShape(fields.size("num_global_key_value_heads", local.num_kv_heads), full.head_dim)
    shapes = [local if window is not None else full for window in windows]
    if by_layer is not None:
        if not isinstance(by_layer, dict) or not all(isinstance(each, dict) for each in by_layer.values()):
            raise fields.refuse("per_layer_config", "must map layers to objects.")
        for layer in range(len(windows)):
            own = Fields(fields.path, by_layer.get(str(layer), {}))
            heads, width = own.size("num_key_value_heads", local.num_kv_heads), own.size("head_dim", local.head_dim)
            shapes[layer] = HeadShape(heads, width)
    num_heads = fields.size("num_attention_heads")
    for shape in shapes:
        if num_heads % shape.num_kv_heads:
            keys = "num_key_value_heads and num_global_key_value_heads"
            raise fields.refuse("num_attention_heads", f"must be a multiple of {shape.num_kv_heads} KV heads ({keys}).")
        if shape.head_dim % 2:
            raise fields.refuse("global_head_dim", f"and head_dim must be even: a layer has {shape.head_dim}.")
    return tuple(shapes)


def _ropes(fields: Fields) -> tuple[RopeParameters, RopeParameters]:
    """Returns the rotations of full and of windowed layers."""
    longest = fields.size("max_position_embeddings")
    key, raw = rope_object(fields)
    if raw and not all(isinstance(raw.get(kind), dict) for kind in ("full_attention", "sliding_attention")):
        raise fields.refuse(key, "must have an object for full_attention and one for sliding_attention.")
    full, local = raw.get("full_attention", _GLOBAL_ROPE), raw.get("sliding_attention", _LOCAL_ROPE)
    allowed = {"allows_partial": True, "allows_proportional": True}
    return (
        parse_rope_object(fields, key, full, longest, **allowed),
        parse_rope_object(fields, key, local, longest),
    )


def _moe(fields: Fields) -> MoESpec:
    num_experts, top_k = fields.size("num_experts"), fields.size("top_k_experts")
    if top_k > num_experts:
        raise fields.refuse("top_k_experts", f"must be at most num_experts = {num_experts}.")
    return MoESpec(
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        normalizes_top_k=True,
        activation="gelu_tanh",
        has_expert_scale=True,
    )


def _count(fields: Fields, key: str) -> int:
    value = fields.optional_integer(key) or 0
    if value < 0:
        raise fields.refuse(key, "must not be negative.")
    return value
