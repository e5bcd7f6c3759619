"""Translates the metadata of a GGUF file to `config.json`, and chooses the translation of its tensors.

Reverses llama.cpp's convert_hf_to_gguf.py. It knows neither files nor encodings of weights. No torch.
"""

from collections.abc import Mapping
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.dense import DENSE
from mini_infer_engine.gguf.experts import EXPERTS, SIGMOID
from mini_infer_engine.gguf.header import GgufHeader
from mini_infer_engine.gguf.hybrids import HYBRIDS
from mini_infer_engine.gguf.translation import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Architecture,
    Metadata,
    num_layers,
)

ARCHITECTURES = dict(sorted((DENSE | EXPERTS | HYBRIDS).items()))
"""Translations by `general.architecture`; Mixtral's value is "llama", and DeepSeek-V3's is "deepseek2"."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Tokens that end an answer, whatever the file names as EOS (llama.cpp does the same)."""


def architecture_of(header: GgufHeader) -> Architecture:
    """Returns the file's architecture. Raises ModelError if it is not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: general.architecture = {name!r}: read from GGUF are {known}.")
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return ARCHITECTURES["mixtral"]
    if name == "deepseek2" and header.metadata.get("deepseek2.expert_gating_func") == SIGMOID:
        return ARCHITECTURES["deepseek3"]
    return ARCHITECTURES[name]


def model_config(header: GgufHeader, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Returns `config.json` as an object; `factors` are the values of the `FACTORS_TENSORS` that the file has.

    Raises ModelError if the architecture is not supported, or a field is missing.
    """
    architecture, metadata = architecture_of(header), Metadata(header)
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{header.path}: tensor token_embd.weight is missing: the file is broken; download it again.")
    if (parts := header.metadata.get("split.count", 1)) not in (0, 1):
        raise ModelError(
            f"{header.path} is one of {parts} parts of a model: make one file of them (llama-gguf-split --merge)."
        )
    for key in ("embedding_length", "attention.head_count", "attention.head_count_kv"):
        value = metadata.width(key) if metadata.get(key) is not None else 1
        if not isinstance(value, int) or value <= 0:
            raise metadata.refuse(key, "it must be a positive integer")
    metadata.need("attention.head_count")
    heads, hidden = metadata.width("attention.head_count"), metadata.need("embedding_length")
    rotary_dim = metadata.get("rope.dimension_count")
    rotates_freely = architecture.rotates_partly or architecture.rotates_apart
    usual_dim = hidden // heads if rotates_freely else rotary_dim or hidden // heads
    head_dim = metadata.get("attention.key_length", usual_dim)
    if rotary_dim not in (None, head_dim) and not rotates_freely:
        raise metadata.refuse("rope.dimension_count", f"only whole heads, of {head_dim} dimensions, are rotated here")
    common = {
        "architectures": [architecture.name],
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _intermediate_size(metadata),
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.width("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "torch_dtype": "bfloat16",
        "eos_token_id": eos_token_ids(header),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    if architecture.rotates_partly and rotary_dim:
        common["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = _rope_scaling(metadata, factors)
    if scaling is not None:
        common["rope_scaling"] = scaling
    return common | architecture.fields(metadata)


def _intermediate_size(metadata: Metadata) -> int:
    """Returns the width of the feed-forward blocks; files of models with experts alone have that of an expert."""
    width = metadata.width("feed_forward_length") or metadata.width("expert_feed_forward_length")
    return width if width is not None else int(metadata.need("feed_forward_length"))


def eos_token_ids(header: GgufHeader) -> list[int]:
    """Returns the file's tokens for the end of text, of a turn and of a message, and well-known ends of a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [header.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    places = {token: index for index, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    known = [places[token] for token in _TURN_ENDS if token in places]
    return sorted({token_id for token_id in (*named, *known) if isinstance(token_id, int)})


def _rope_scaling(metadata: Metadata, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    """Returns `rope_scaling` of config.json. Llama 3.1's factors become longrope's, which divides frequencies in the
    same way.
    """
    if ROPE_FACTORS in factors:
        both = factors[ROPE_FACTORS]
        return {"rope_type": "longrope", "attention_factor": 1.0, "factor": 1.0} | {
            "short_factor": both,
            "long_factor": both,
        }
    if LONG_FACTORS in factors and SHORT_FACTORS in factors:
        scaling = {"short_factor": factors[SHORT_FACTORS], "long_factor": factors[LONG_FACTORS]}
        return {"rope_type": "longrope", "attention_factor": metadata.get("rope.scaling.attn_factor")} | scaling
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.need("rope.scaling.factor")}
    if kind == "yarn":
        original = metadata.need("rope.scaling.original_context_length")
        factor = metadata.need("rope.scaling.factor")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise metadata.refuse("rope.scaling.type", "supported are none, linear and yarn")
