"""A model folder's `config.json` and `generation_config.json` as frozen data, checked where they enter.

This file knows the fields and defaults of transformers 5 and of the older forms that published checkpoints still use;
it knows neither torch nor which tensors a model has.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from mini_infer_engine.config.errors import ModelError

logger = logging.getLogger(__name__)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What `models.registry` can build."""

RopeType = Literal["default", "linear", "llama3", "yarn"]
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")
_MISTRAL_DEFAULT_WINDOW = 4096
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How positions become rotations; fields that a `type` does not use keep their defaults."""

    type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    """One for each layer: tokens that a token sees, itself among them; None: all before it."""
    dtype: str
    """The checkpoint's: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else from config.json, else the tokenizer's; may be empty."""
    bos_token_id: int | None

    @staticmethod
    def from_directory(directory: Path) -> "ModelConfig":
        """Read and check `config.json`, and the EOS ids of `generation_config.json` or of the tokenizer where needed.

        Raises:
            ModelError: a file is missing, unreadable, or asks for what the engine cannot do.

        """
        generation = GenerationDefaults.from_directory(directory)
        config = parse_model_config(_Fields.read(directory / "config.json"), generation.eos_token_ids)
        if config.eos_token_ids:
            return config
        from_tokenizer = _tokenizer_eos(directory, config.vocab_size)
        if not from_tokenizer:
            logger.warning("%s: no file names an EOS token: texts end at stop strings or at their limit", directory)
        return replace(config, eos_token_ids=from_tokenizer)


def _tokenizer_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokenizer's EOS, where the folder has a tokenizer whose EOS the model can choose."""
    # Imported here: tokenizing is the other process's work, and hardly any model needs this.
    from mini_infer_contract.prompt import PromptAssets, PromptEncoder

    if not (directory / "tokenizer.json").exists():
        return ()
    try:
        token_id = PromptEncoder(PromptAssets.from_directory(directory)).special_token_id("eos_token")
    except ValueError as error:
        raise ModelError(f"{directory}: {error}; name eos_token_id in config.json, or repair the tokenizer.") from error
    return () if token_id is None or token_id >= vocab_size else (token_id,)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults that a model's makers ship; None: they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Fields that would change the text and have no counterpart here, with their values."""

    def summary(self) -> str:
        """Which fields of generation_config.json are the defaults of requests, and which cannot be; "" for none."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        taken = {name: value for name in names if (value := getattr(self, name)) is not None}
        parts = [f"requests that say nothing else get {_listed(taken)}"] if taken else []
        if self.ignored:
            parts.append(f"not supported and ignored: {_listed(self.ignored)}")
        return "; ".join(parts)

    @staticmethod
    def from_directory(directory: Path) -> "GenerationDefaults":
        """Read `generation_config.json`; all None where the folder has none.

        Raises:
            ModelError: the file is no JSON object or a value has the wrong type.

        """
        path = directory / "generation_config.json"
        if not path.exists():
            return GenerationDefaults()
        fields = _Fields.read(path)
        if fields.boolean("do_sample", True):
            sampling = {name: fields.optional_number(name) for name in ("temperature", "top_p", "min_p")}
            top_k = fields.optional_integer("top_k")
        else:
            sampling, top_k = {"temperature": 0.0}, None
        ignored = {
            name: value
            for name, neutral in _UNSUPPORTED_GENERATION.items()
            if (value := fields.values.get(name)) is not None and value not in neutral
        }
        return GenerationDefaults(
            **sampling,
            top_k=top_k,
            repetition_penalty=fields.optional_number("repetition_penalty"),
            eos_token_ids=fields.token_ids("eos_token_id"),
            ignored=ignored,
        )


_UNSUPPORTED_GENERATION: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "top_h": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_new_tokens": (),
    "stop_strings": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}
"""Fields of transformers' GenerationConfig that change what is chosen, and the values at which they do not."""


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in values.items())


class _Fields:
    """A JSON object whose reads fail with the file, the key and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    @staticmethod
    def read(path: Path) -> "_Fields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path} is missing: name a model folder in Hugging Face format, which has it.") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as JSON ({error}): repair it or download it again.") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds a {type(values).__name__}, not a JSON object.")
        return _Fields(path, values)

    def refuse(self, key: str, remedy: str) -> ModelError:
        return ModelError(f"{self.path}: {key} = {self.values.get(key)!r}: {remedy}")

    def _get(self, key: str, kinds: tuple[type, ...], default: Any, what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: {key} is missing; it must be {what}.")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.refuse(key, f"must be {what}.")
        return value

    def size(self, key: str, default: Any = ...) -> int:
        value = cast("int", self._get(key, (int,), _REQUIRED if default is ... else default, "a positive integer"))
        if value <= 0:
            raise self.refuse(key, "must be a positive integer.")
        return value

    def optional_integer(self, key: str) -> int | None:
        return cast("int | None", self._get(key, (int,), None, "an integer"))

    def number(self, key: str, default: Any = ...) -> float:
        return float(self._get(key, (int, float), _REQUIRED if default is ... else default, "a number"))

    def optional_number(self, key: str) -> float | None:
        value = self._get(key, (int, float), None, "a number")
        return None if value is None else float(value)

    def boolean(self, key: str, default: bool) -> bool:
        return cast("bool", self._get(key, (bool,), default, "true or false"))

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._get(key, (int, list), [], "a token id or a list of them")
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise self.refuse(key, "must be a token id or a list of them.")
        return tuple(ids)


_REQUIRED = object()


def parse_model_config(fields: _Fields, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """Check every field that changes what is computed; `eos_token_ids` win over the file's own."""
    architecture = _architecture(fields)
    if (act := fields.values.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.refuse("hidden_act", f"only silu is supported, not {act!r}.")
    if fields.values.get("quantization_config") is not None:
        raise fields.refuse("quantization_config", "quantised checkpoints are not supported; use the original weights.")
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"must divide num_attention_heads = {num_heads}.")
    if "head_dim" not in fields.values and hidden_size % num_heads and architecture != "Qwen3ForCausalLM":
        raise fields.refuse("hidden_size", f"must be a multiple of num_attention_heads = {num_heads}.")
    head_dim = fields.size("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", "must be even.")
    bias = fields.boolean("attention_bias", False) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    num_layers = fields.size("num_hidden_layers")
    max_position_embeddings = fields.size("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope_parameters(fields, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", False),
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        dtype=_dtype(fields),
        eos_token_ids=eos_token_ids or fields.token_ids("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
    )


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    supported = "supported are " + ", ".join(ARCHITECTURES) + "."
    if not isinstance(names, list) or not names:
        raise fields.refuse("architectures", supported)
    for name in names:
        if name in ARCHITECTURES:
            return cast("str", name)
    raise fields.refuse("architectures", supported)


def _dtype(fields: _Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.values.get(key) or "float32"
    if dtype not in _DTYPES:
        raise fields.refuse(key, "supported are " + ", ".join(_DTYPES) + ".")
    return cast("str", dtype)


def _sliding_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        # transformers takes a missing key for 4,096 and only an explicit null for "no window".
        absent = "sliding_window" not in fields.values
        window = _MISTRAL_DEFAULT_WINDOW if absent else _window(fields)
        return (window,) * num_layers
    window = _window(fields) if fields.boolean("use_sliding_window", False) else None
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        first = fields.size("max_window_layers", 28) if window else num_layers
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(known):
        raise fields.refuse("layer_types", f"must list {num_layers} times full_attention or sliding_attention.")
    return tuple(known[layer_type] for layer_type in layer_types)


def _window(fields: _Fields) -> int | None:
    return None if fields.values.get("sliding_window") is None else fields.size("sliding_window")


def _rope_parameters(fields: _Fields, max_position_embeddings: int) -> RopeParameters:
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    raw = fields.values.get(key) or {}
    if not isinstance(raw, dict):
        raise fields.refuse(key, "must be an object.")
    if any(isinstance(value, dict) for value in raw.values()):
        raise fields.refuse(key, "different rotations for different layers are not supported.")
    theta = fields.number("rope_theta", _DEFAULT_THETA)
    rope = _Fields(fields.path, {"rope_theta": theta, **raw})
    rope_type = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise fields.refuse(key, f"rope type {rope_type!r} is not supported; supported are {', '.join(_ROPE_TYPES)}.")
    partial = fields.number("partial_rotary_factor", rope.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{fields.path}: partial_rotary_factor = {partial}: only 1.0 is supported.")
    original = fields.size(
        "original_max_position_embeddings",
        rope.size("original_max_position_embeddings", max_position_embeddings),
    )
    needs = ("low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ()
    for name in needs:
        rope.number(name)
    if rope_type in ("linear", "llama3"):
        rope.number("factor")
    return RopeParameters(
        type=cast("RopeType", rope_type),
        theta=rope.number("rope_theta"),
        factor=rope.number("factor", max_position_embeddings / original if rope_type == "yarn" else 1.0),
        original_max_position_embeddings=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", None) if rope.values.get("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow", None) if rope.values.get("beta_slow") else 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )
