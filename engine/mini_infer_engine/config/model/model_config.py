"""The shape of a decoder-only model as frozen data, and the checks that all architectures share.

This file knows the fields and defaults of transformers 5 and of the older forms that published checkpoints still use.
Fields that one architecture reads differently are in its own file under `models/`. It knows neither torch nor tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.recurrence import Mixer, Recurrence
from mini_infer_engine.config.model.rope import RopeParameters, parse_rope, rope_object
from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.config.parallelism.pipeline_parallel import WHOLE, PipelineStage
from mini_infer_engine.config.parallelism.tensor_parallel import ALONE, TensorParallel
from mini_infer_engine.config.pooling.pooler_config import LAST_TOKEN, PoolerConfig
from mini_infer_engine.config.quantization.checkpoint import KVCacheDtype, parse_kv_cache_dtype, parse_quantization
from mini_infer_engine.config.quantization.schemes import Schemes
from mini_infer_engine.config.quantization.widened import WidenedForm, widened_form

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The KV heads of a layer."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder-only model. Tuples named after layers have one entry for each layer."""

    architecture: str
    model_impl: Literal["native", "transformers"] = "native"
    """The code that computes the model: a file of ours, or transformers' own."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    ropes: tuple[RopeParameters, ...]
    """The rotation of each layer."""
    max_position_embeddings: int
    """The longest context that is served: config.json's, extended by the factor of its rope scaling."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    """Sliding window of each layer: tokens that a token sees, itself among them; None if it sees all before it."""
    head_shapes: tuple[HeadShape, ...] | None = None
    """The KV heads of each layer, if they differ; None: `num_kv_heads` of `head_dim` in all."""
    kv_sources: tuple[int, ...] | None = None
    """The layer whose keys and values each layer reads: its own, or an earlier layer's; None: its own in all."""
    mixers: tuple[Mixer, ...] | None = None
    """The block that mixes the tokens in each layer; None: attention in all layers."""
    recurrence: Recurrence | None = None
    """The shape of the layers whose mixer is recurrent; None if there are none."""
    activation: Activation = "silu"
    """Activation of the gate in the feed-forward block."""
    attention_scale: float
    """Factor of queries times keys before the softmax."""
    attention_softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) before mask and softmax."""
    attention_sinks: bool = False
    """True if the softmax of each head has a learned logit beside its scores."""
    attention_alibi: bool = False
    """True if keys have their positions as further dimensions, from which biases of ALiBi are made."""
    logits_softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap); None if they are not capped."""
    logits_divisor: float = 1.0
    """Divisor of logits, applied before the softcap."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings."""
    norm_offset: float = 0.0
    """Added to the weights of every norm: some checkpoints store them less one."""
    quantization: Schemes | None = None
    """Schemes in which the linear layers are stored; None if they are in `dtype`."""
    widened: WidenedForm | None = None
    """The form of quantised weights that are dequantised when they are loaded, so that no layer is quantised."""
    kv_cache_dtype: KVCacheDtype | None = None
    """Data type for which the checkpoint's makers measured keys and values; None if it is `dtype`."""
    dtype: str
    """Data type of the checkpoint: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids from generation_config.json, else from config.json, else the tokenizer's; may be empty."""
    bos_token_id: int | None
    vision: VisionConfig | None = None
    """The vision encoder; None if the model reads text alone."""
    pooler: PoolerConfig = LAST_TOKEN
    """The embeddings or scores that are made of hidden states."""
    tensor_parallel: TensorParallel = ALONE
    """The part of each layer that is built: sizes above are those of the whole model."""
    stage: PipelineStage = WHOLE
    """The pipeline stage whose layers are built."""

    @property
    def layers(self) -> range:
        """The layers that are built: all, or a stage's."""
        return range(self.num_layers) if self.stage.layers is None else self.stage.layers

    @property
    def attention_layers(self) -> Sequence[int]:
        """The layers that are built and have keys and values, in order: their places are those in the page pool."""
        mixers, sources = self.mixers, self.kv_sources
        if sources is not None:
            return [layer for layer in self.layers if sources[layer] == layer]
        return self.layers if mixers is None else [layer for layer in self.layers if mixers[layer] == "attention"]

    def head_shape(self, layer: int) -> HeadShape:
        """Returns the KV heads of a layer, of the whole model."""
        shapes = self.head_shapes
        return HeadShape(self.num_kv_heads, self.head_dim) if shapes is None else shapes[layer]

    def kv_index(self, layer: int) -> int:
        """Returns the place of a layer's keys and values among those of all layers with the same KV heads."""
        source = layer if self.kv_sources is None else self.kv_sources[layer]
        if self.head_shapes is None:
            return self.attention_layers.index(source)
        shape = self.head_shapes[source]
        return [each for each in self.attention_layers if self.head_shapes[each] == shape].index(source)

    @property
    def recurrent_layers(self) -> Sequence[int]:
        """The layers that are built and have a recurrent state, in order: their places are those in its slots."""
        mixers = self.mixers
        return () if mixers is None else [layer for layer in self.layers if mixers[layer] == "recurrent"]

    @property
    def needs_token_ids(self) -> bool:
        """True if layers read more of a token's id than its embedding."""
        return False

    @property
    def has_embeddings(self) -> bool:
        """True if the table of embeddings is built: a pass begins with it, and it may be the head too."""
        return self.stage.is_first or (self.stage.is_last and self.tie_word_embeddings)


def parse_decoder(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...], **different: Any
) -> dict[str, Any]:
    """Returns the arguments of `ModelConfig` for a decoder of Llama's kind; `different` replaces those that an
    architecture changes.

    Every field that changes the computation is checked. `eos_token_ids` win over the file's own.
    """
    widened = widened_form(fields)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"must divide num_attention_heads = {num_heads}.")
    extends_context = different.pop("extends_context", True)
    default_head_dim = different.pop("default_head_dim", None)
    if default_head_dim is None:
        if "head_dim" not in fields.values and hidden_size % num_heads:
            raise fields.refuse("hidden_size", f"must be a multiple of num_attention_heads = {num_heads}.")
        default_head_dim = hidden_size // num_heads
    head_dim = fields.size("head_dim", default_head_dim)
    if head_dim % 2:
        raise fields.refuse("head_dim", "must be even.")
    num_layers = fields.size("num_hidden_layers")
    max_position_embeddings = fields.size("max_position_embeddings")
    eps = fields.number("rms_norm_eps", different.pop("default_eps", 1e-6))
    if eps < 0:
        raise fields.refuse("rms_norm_eps", "must not be negative.")
    common = {
        "architecture": architecture,
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.size("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": eps,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", different.pop("default_tie", False)),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "sliding_windows": (None,) * num_layers,
        "attention_scale": head_dim**-0.5,
        "quantization": None if widened is not None else parse_quantization(fields),
        "widened": widened,
        "kv_cache_dtype": parse_kv_cache_dtype(fields),
        "dtype": parse_dtype(fields),
        "eos_token_ids": eos_token_ids or fields.token_ids("eos_token_id"),
        "bos_token_id": fields.optional_integer("bos_token_id"),
    }
    if "ropes" not in different:
        common["ropes"] = (parse_rope(fields, max_position_embeddings),) * num_layers
    arguments = common | different
    for rope in set(arguments["ropes"]):
        _check_rotation(fields, rope, head_dim)
    if extends_context:
        contexts = [rope.context(max_position_embeddings) for rope in arguments["ropes"] if rope.type != "none"]
        arguments["max_position_embeddings"] = min(contexts, default=max_position_embeddings)
    return arguments


def _check_rotation(fields: Fields, rope: RopeParameters, head_dim: int) -> None:
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2:
        raise fields.refuse("partial_rotary_factor", f"of {head_dim} dimensions a head it takes an odd number.")
    lengths = {len(rope.short_factors), len(rope.long_factors)}
    if rope.type == "longrope" and lengths != {rotary_dim // 2}:
        key, _ = rope_object(fields)
        raise fields.refuse(key, f"short_factor and long_factor must have {rotary_dim // 2} numbers each.")


def parse_activation(fields: Fields, key: str = "hidden_act", *supported: Activation) -> Activation:
    """Returns the gate's activation under `key`. Raises ModelError if this architecture is not served with it."""
    value = fields.values.get(key, "silu")
    activation = _ACTIVATIONS.get(value) if isinstance(value, str) else None
    if activation is None or activation not in (supported or ("silu",)):
        raise fields.refuse(key, f"only {' or '.join(supported or ('silu',))} is supported.")
    return activation


def sliding_window(fields: Fields) -> int | None:
    """Returns the tokens of `sliding_window`; None if the file says null or nothing."""
    return None if fields.values.get("sliding_window") is None else fields.size("sliding_window")


def windows_by_layer(
    fields: Fields, num_layers: int, window: int | None, otherwise: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """Returns the window of each layer by `layer_types`; `otherwise` if the file has none."""
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        return otherwise
    windows = {"full_attention": None, "sliding_attention": window}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(windows):
        raise fields.refuse("layer_types", f"must list {num_layers} times full_attention or sliding_attention.")
    return tuple(windows[layer_type] for layer_type in layer_types)


def parse_dtype(fields: Fields) -> str:
    """Returns the data type of the checkpoint, float32 if it is missing or "auto", as transformers does.

    Raises ModelError if it is none that is served.
    """
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.values.get(key) or "auto"
    if dtype == "auto":
        return "float32"
    if dtype not in _DTYPES:
        raise fields.refuse(key, "supported are " + ", ".join(_DTYPES) + ".")
    return cast("str", dtype)
