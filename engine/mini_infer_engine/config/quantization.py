"""`quantization_config` of a model's config.json: which scheme its linear layers are stored in. No torch.

Read are FP8 checkpoints of three makes, `fp8` (DeepSeek-V3's and Qwen's, transformers' FineGrainedFP8Config),
`compressed-tensors` (llm-compressor's, whose format is that package's `config_groups`) and `modelopt` (NVIDIA's), the
integers of compressed-tensors, GPTQ and AWQ (`integer_quantization`), and 4-bit floats (`fp4_quantization`).
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from mini_infer_engine.config.fields import Fields
from mini_infer_engine.config.fp4_quantization import Fp4Scheme, parse_compressed_fp4, parse_modelopt_fp4
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


KVCacheDtype = Literal["fp8", "int8"]
Scheme = Fp8Scheme | IntegerScheme | Fp4Scheme
_MODELOPT_FILE = "hf_quant_config.json"


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
        file = _modelopt_file(fields)
        if file is None:
            return None
        values = dict(file.values)
        return _parse_modelopt(file, values, _names(file, values, "exclude_modules"))
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
    if method == "modelopt":
        return _parse_modelopt(fields, raw, _names(fields, raw, "ignore"))
    supported = "supported are fp8, compressed-tensors, gptq, awq and modelopt"
    raise refuse(fields, f"quant_method = {method!r}", supported)


def parse_kv_cache_dtype(fields: Fields) -> KVCacheDtype | None:
    """How the checkpoint wants keys and values kept: compressed-tensors' and modelopt's `kv_cache_scheme`; None: it
    does not say.

    Its scales are not needed: see `runtime.kv_rows`.
    """
    raw = fields.values.get("quantization_config")
    if raw is None and (file := _modelopt_file(fields)) is not None:
        return "fp8" if file.values.get("kv_cache_quant_algo") == "FP8" else None
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


def _modelopt_file(fields: Fields) -> Fields | None:
    """Of modelopt's first checkpoints, whose config.json says nothing: hf_quant_config.json, where there is one."""
    path = fields.path.parent / _MODELOPT_FILE
    if not path.is_file():
        return None
    file = Fields.read(path)
    raw = file.values.get("quantization")
    if not isinstance(raw, dict):
        raise file.refuse("quantization", "must be an object.")
    return Fields(path, raw)


def _parse_modelopt(fields: Fields, raw: dict[str, Any], ignored: tuple[str, ...]) -> Scheme | None:
    """The scheme; None: keys and values alone are quantised."""
    algorithm = str(raw.get("quant_algo") or "").upper()
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return parse_modelopt_fp4(fields, raw, ignored)
    if not algorithm:
        return None
    if algorithm == "FP8":
        return Fp8Scheme("tensor", (0, 0), "weight_scale", ignored)
    supported = "of modelopt NVFP4, W4A16_NVFP4 and FP8 are supported"
    raise refuse(fields, f"quant_algo = {raw.get('quant_algo')!r}", supported)


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
    form = group.get("format") or raw.get("format")
    if weights.get("type", "int") == "int":
        return parse_compressed_integers(fields, form, group, weights, ignored)
    if weights.get("num_bits") == 4:
        return parse_compressed_fp4(fields, form, weights, ignored)
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
