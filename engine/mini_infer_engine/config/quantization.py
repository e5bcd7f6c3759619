"""`quantization_config` of a model's config.json: which scheme its linear layers are stored in. No torch.

Read are FP8 checkpoints of two makes, `fp8` (DeepSeek-V3's and Qwen's, transformers' FineGrainedFP8Config) and
`compressed-tensors` (llm-compressor's, whose format is that package's `config_groups`), and the integers of
compressed-tensors, GPTQ and AWQ (`integer_quantization`).
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from mini_infer_engine.config.fields import Fields
from mini_infer_engine.config.integer_quantization import (
    IntegerScheme,
    parse_awq,
    parse_compressed_integers,
    parse_gptq,
    refuse,
)

Strategy = Literal["tensor", "channel", "block"]


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights in float8 e4m3fn with scales; activations stay in the model's dtype."""

    strategy: Strategy
    """One scale a tensor, one a row of the weight, or one a block."""
    block: tuple[int, int]
    """Rows and columns that share a scale, with strategy "block"."""
    scale_name: str
    """Of the scales beside `weight` in the checkpoint."""
    ignored: tuple[str, ...]
    """Layers that are not quantised: names, beginnings of names, or patterns."""


Scheme = Fp8Scheme | IntegerScheme
KVCacheDtype = Literal["fp8", "int8"]


def applies_to(scheme: Scheme, layer: str) -> bool:
    """Whether the layer of this name is quantised."""
    return not any(_matches(layer, pattern) for pattern in scheme.ignored)


def unused_suffixes(scheme: Scheme | None, kv_cache_dtype: KVCacheDtype | None) -> tuple[str, ...]:
    """Of tensors that a checkpoint may have and that are not read: GPTQ's groups, in their order, and scales of keys
    and values, which have their own for each token here.
    """
    groups = (".g_idx",) if isinstance(scheme, IntegerScheme) and not scheme.act_order else ()
    scales = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")
    return groups + (() if kv_cache_dtype is None else scales)


def parse_quantization(fields: Fields) -> Scheme | None:
    """The scheme; None: the weights are not quantised. ModelError: they are, in a way that is not supported."""
    raw = fields.values.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise fields.refuse("quantization_config", "must be an object.")
    method = raw.get("quant_method")
    if method == "fp8":
        return _parse_fp8(fields, raw)
    if method == "compressed-tensors":
        return _parse_compressed_tensors(fields, raw)
    if method == "gptq":
        return parse_gptq(fields, raw)
    if method == "awq":
        return parse_awq(fields, raw, _names(fields, raw, "modules_to_not_convert"))
    raise refuse(fields, f"quant_method = {method!r}", "supported are fp8, compressed-tensors, gptq and awq")


def parse_kv_cache_dtype(fields: Fields) -> KVCacheDtype | None:
    """How the checkpoint wants keys and values kept: compressed-tensors' `kv_cache_scheme`; None: it does not say.

    Its scales are not needed: see `runtime.kv_rows`.
    """
    raw = fields.values.get("quantization_config")
    scheme = raw.get("kv_cache_scheme") if isinstance(raw, dict) else None
    if not isinstance(scheme, dict) or scheme.get("num_bits") != 8:
        return None
    kinds: dict[str, KVCacheDtype] = {"float": "fp8", "int": "int8"}
    return kinds.get(str(scheme.get("type", "int")))


def _parse_fp8(fields: Fields, raw: dict[str, Any]) -> Fp8Scheme:
    ignored = ("lm_head", *_names(fields, raw, "modules_to_not_convert"), *_names(fields, raw, "ignored_layers"))
    block = raw.get("weight_block_size")
    if block is None:
        return Fp8Scheme("tensor", (0, 0), "weight_scale", ignored)
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise refuse(fields, f"weight_block_size = {block!r}", "it must be two positive integers")
    return Fp8Scheme("block", (block[0], block[1]), "weight_scale_inv", ignored)


def _parse_compressed_tensors(fields: Fields, raw: dict[str, Any]) -> Scheme | None:
    groups = raw.get("config_groups")
    if not groups and isinstance(raw.get("kv_cache_scheme"), dict):
        return None
    if not isinstance(groups, dict) or len(groups) != 1:
        raise refuse(fields, "config_groups", "exactly one group, of all linear layers, is supported")
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        raise refuse(fields, "config_groups", "supported is one group with targets ['Linear'] and weights")
    ignored = _names(fields, raw, "ignore")
    if weights.get("type", "int") == "int":
        form = group.get("format") or raw.get("format")
        return parse_compressed_integers(fields, form, weights, ignored)
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True))
    if kind != ("float", 8, True):
        raise refuse(fields, f"weights of {kind[1]} bits, type {kind[0]!r}", "supported are symmetric 8-bit floats")
    strategy = weights.get("strategy")
    block = weights.get("block_structure") or [0, 0]
    if strategy not in ("tensor", "channel", "block") or (strategy == "block" and block == [0, 0]):
        raise refuse(fields, f"strategy = {strategy!r}", "supported are tensor, channel, block")
    return Fp8Scheme(strategy, (block[0], block[1]), "weight_scale", ignored)


def _names(fields: Fields, raw: dict[str, Any], key: str) -> tuple[str, ...]:
    names = raw.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refuse(fields, key, "it must be a list of names")
    return tuple(names)


def _matches(layer: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    return layer == pattern or layer.startswith(f"{pattern}.") or fnmatchcase(layer, pattern)
