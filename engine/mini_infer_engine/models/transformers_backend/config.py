"""Makes our config of a model that runs through transformers: what its attention asks of the page pool, and what the
engine must know beside.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.utils.generic import ModelOutput

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.architectures import nearest_that_runs
from mini_infer_engine.config.model.model_config import ModelConfig, parse_dtype
from mini_infer_engine.config.model.rope import NO_ROTATION
from mini_infer_engine.config.quantization.unread import form_of, refuse_mlx
from mini_infer_engine.models.transformers_backend.build import build, fix_rotations, read_hf_config, refuse_config
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.transformers_backend.probe import PROBE, LayerCall, Probe, probe

_LONGEST = ("max_position_embeddings", "max_seq_len", "seq_length")
"""The fields of a config with the longest context: transformers' name, MPT's and Bloom's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """The config of a model whose code is transformers'. Fields of our own layers say that there are none."""

    hf_config: PretrainedConfig = field(compare=False, repr=False)
    """The config by transformers' class. It must not be changed."""
    trust_remote_code: bool
    """True if the code is the folder's own."""
    calls: tuple[LayerCall, ...]
    """The attention calls of a pass, each with pages of its own."""
    backbone: str
    """The path of the decoder in the model."""
    output_class: type[ModelOutput]
    """The class of the decoder's output."""


def parse_transformers_config(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...], *, trust_remote_code: bool
) -> TransformersConfig:
    """Builds the model without memory and probes it.

    Raises:
        ModelError: the model cannot run through transformers on the page pool; the message gives the reason.
    """
    _refuse_quantized(fields, architecture)
    dtype = parse_dtype(fields)
    try:
        hf_config = read_hf_config(fields, trust_remote_code=trust_remote_code)
        trust_remote_code = hf_config.model_type not in CONFIG_MAPPING
        if not trust_remote_code:
            _check_class(hf_config, architecture)
        refuse_config(hf_config)
        model = build(hf_config, PROBE, torch.float32, trust_remote_code=trust_remote_code)
        fix_rotations(model, 1)  # whichever factors a probe takes, they change no shape
        found = probe(model)
        _check_calls(found, hf_config)
        longest = _max_positions(hf_config)
    except UnsupportedError as error:
        raise fields.refuse(
            "architectures",
            f"{architecture} does not run through transformers: {error}. "
            f"{nearest_that_runs(architecture, is_unknown=fields.values.get('model_type') not in CONFIG_MAPPING)}",
        ) from error
    first = found.calls[0]
    return TransformersConfig(
        architecture=architecture,
        model_impl="transformers",
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=0,
        num_layers=len(found.calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        rms_norm_eps=0.0,
        ropes=(NO_ROTATION,) * len(found.calls),  # queries and keys are rotated when they reach attention
        max_position_embeddings=longest,
        tie_word_embeddings=bool(getattr(hf_config, "tie_word_embeddings", False)),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        sliding_windows=tuple(call.window for call in found.calls),
        attention_scale=first.scale,
        attention_softcap=first.softcap,
        attention_sinks=any(call.sinks for call in found.calls),
        attention_alibi=any(call.alibi for call in found.calls),
        dtype=dtype,
        eos_token_ids=eos_token_ids or fields.token_ids("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        hf_config=hf_config,
        trust_remote_code=trust_remote_code,
        calls=found.calls,
        backbone=found.backbone,
        output_class=found.output_class,
    )


def _refuse_quantized(fields: Fields, architecture: str) -> None:
    """Raises ModelError if the weights are quantised, whatever their form."""
    refuse_mlx(fields)
    raw = fields.values.get("quantization_config")
    if raw is not None:
        form = form_of(raw) if isinstance(raw, dict) else repr(raw)
        raise ModelError(
            f"{fields.path}: quantization_config: {form}: {architecture} runs through transformers, which does not "
            "read quantised weights here yet: use the original weights."
        )


def _check_class(config: PretrainedConfig, architecture: str) -> None:
    """Raises UnsupportedError if transformers would build another class than the config names."""
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise UnsupportedError(f"model_type {config.model_type!r} has no causal language model in transformers")
    built = mapping[type(config)]
    names = {each.__name__ for each in (built if isinstance(built, tuple) else (built,))}
    if architecture not in names:
        raise UnsupportedError(
            f"transformers runs configs of model_type {config.model_type!r} as {', '.join(sorted(names))}"
        )


def _max_positions(config: PretrainedConfig) -> int:
    for name in _LONGEST:
        longest = getattr(config, name, None)
        if isinstance(longest, int) and longest > 0:
            return longest
    raise UnsupportedError(f"its config has no {_LONGEST[0]}, so that the longest context is unknown")


def _check_calls(found: Probe, config: PretrainedConfig) -> None:
    """Raises UnsupportedError if some layers do not attend, or if their pages would have different sizes."""
    calls, layers = found.calls, getattr(config, "num_hidden_layers", None)
    if not calls:
        raise UnsupportedError("its attention does not go through transformers' attention interface")
    if isinstance(layers, int) and len(calls) < layers:
        raise UnsupportedError(
            f"only {len(calls)} of its {layers} layers attend: the others may keep a state that is no attention"
        )
    for name in ("num_heads", "num_kv_heads", "head_dim", "softcap"):
        values = {getattr(call, name) for call in calls}
        if len(values) > 1:
            raise UnsupportedError(f"its layers differ in {name}, and pages have one size")
