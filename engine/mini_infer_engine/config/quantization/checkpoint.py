"""Reads `quantization_config` of a model's config.json: the scheme in which its linear layers are stored. No torch.

FP8 checkpoints of three makes are read, `fp8` (DeepSeek-V3's and Qwen's, transformers' FineGrainedFP8Config),
`compressed-tensors` (llm-compressor's, `config.compressed_tensors`) and `modelopt` (NVIDIA's), the integers of
compressed-tensors, GPTQ and AWQ (`config.quantization.integer`), and 4-bit floats (`config.quantization.fp4`).
"""

import re
from typing import Any, Literal

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.quantization.compressed_tensors import parse_compressed_tensors
from mini_infer_engine.config.quantization.fields import check_pattern, errors_of, names, refuse
from mini_infer_engine.config.quantization.fp4 import MX_EXPERTS, Fp4Scheme, parse_modelopt_fp4
from mini_infer_engine.config.quantization.integer import IntegerScheme, parse_awq, parse_gptq
from mini_infer_engine.config.quantization.schemes import ALL_LINEAR, PATTERN, Fp8Scheme, Rule, Scheme, Schemes
from mini_infer_engine.config.quantization.unread import refuse_mlx, refuse_unread

KVCacheDtype = Literal["fp8", "int8"]
KV_SCALES = (
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".q_zero_point",
    ".k_zero_point",
    ".v_zero_point",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
    ".k_proj.output_zero_point",
    ".v_proj.output_zero_point",
)
"""Ends of the names of scales of keys and values, and of queries beside them, in compressed-tensors', AutoFP8's and
modelopt's checkpoints. They are not read: keys and values of each token have their own here (`runtime.kv_rows`).
"""
_MODELOPT_FILE = "hf_quant_config.json"


ZERO_SUFFIX = ".bias"
"""Suffix of biases, which GPTQ's tools write for layers that have none: unread ones must be zero."""


def unused_suffixes(schemes: Schemes | None) -> tuple[str, ...]:
    """Returns the suffixes of tensors that a checkpoint may have and that are not read: GPTQ's groups, if they are in
    their order, and biases (`ZERO_SUFFIX`).
    """
    found = [rule.scheme for rule in ([] if schemes is None else schemes.rules)]
    integers = [scheme for scheme in found if isinstance(scheme, IntegerScheme)]
    in_order = (".g_idx",) if any(not scheme.act_order for scheme in integers) else ()
    return (*in_order, ZERO_SUFFIX) if any(scheme.form == "gptq" for scheme in integers) else in_order


def parse_quantization(fields: Fields) -> Schemes | None:
    """Returns the schemes; None if the weights are not quantised. Raises ModelError if they are, in an unsupported
    form.
    """
    raw = fields.values.get("quantization_config")
    if raw is None:
        refuse_mlx(fields)
        file = _modelopt_file(fields)
        if file is None:
            return None
        values = dict(file.values)
        return _parse_modelopt(file, values, names(file, values, "exclude_modules"))
    if not isinstance(raw, dict):
        raise fields.refuse("quantization_config", "must be an object.")
    method = raw.get("quant_method")
    if method == "fp8":
        return _parse_fp8(fields, raw)
    if method == "compressed-tensors":
        return parse_compressed_tensors(fields, raw)
    if method == "gptq":
        return _parse_gptq(fields, raw)
    if method == "awq":
        kept = (f"*{name}*" for name in names(fields, raw, "modules_to_not_convert"))
        return Schemes.of_all(parse_awq(fields, raw), ("lm_head", *kept))
    if method == "modelopt":
        return _parse_modelopt(fields, raw, names(fields, raw, "ignore"))
    if method == "mxfp4":
        plain = names(fields, raw, "modules_to_not_convert")
        return Schemes((Rule(f"{PATTERN}{MX_EXPERTS}", Fp4Scheme("mxfp4", 32)),), plain)
    raise refuse_unread(fields, raw)


def parse_kv_cache_dtype(fields: Fields) -> KVCacheDtype | None:
    """Returns the format for cached keys and values that the checkpoint names: compressed-tensors' and modelopt's
    `kv_cache_scheme`; None if it names none.

    Its scales are not needed: see `runtime.kv_rows`.
    """
    raw = fields.values.get("quantization_config")
    if raw is None and (file := _modelopt_file(fields)) is not None:
        return "fp8" if file.values.get("kv_cache_quant_algo") == "FP8" else None
    scheme = raw.get("kv_cache_scheme") if isinstance(raw, dict) else None
    if isinstance(raw, dict) and raw.get("quant_method") == "fp8" and isinstance(scheme, str):
        return "fp8"  # AutoFP8's: "static"
    if not isinstance(scheme, dict) or scheme.get("num_bits") != 8:
        return None
    kinds: dict[str, KVCacheDtype] = {"float": "fp8", "int": "int8"}
    return kinds.get(str(scheme.get("type", "int")))


def _parse_fp8(fields: Fields, raw: dict[str, Any]) -> Schemes:
    kept = names(fields, raw, "modules_to_not_convert")
    ends = (f"*{name}" for name in kept)  # transformers takes them for ends of layers' names, too
    ignored = ("lm_head", *kept, *ends, *names(fields, raw, "ignored_layers"))
    block = raw.get("weight_block_size")
    if block is None:
        return Schemes.of_all(Fp8Scheme("tensor", (0, 0), "weight_scale"), ignored)
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise refuse(fields, f"weight_block_size = {block!r}", "it must be two positive integers")
    return Schemes.of_all(Fp8Scheme("block", (block[0], block[1]), "weight_scale_inv"), ignored)


def _parse_gptq(fields: Fields, raw: dict[str, Any]) -> Schemes:
    """Reads GPTQModel's `dynamic`: the first pattern that matches a layer's name changes its scheme, or, after "-:",
    has it not quantised.
    """
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(changes, dict) for changes in dynamic.values()):
        raise refuse(fields, "dynamic", "it must be an object of patterns, each with an object of changes")
    rules = []
    for key, changes in dynamic.items():
        pattern = key.removeprefix("-:").removeprefix("+:")
        check_pattern(fields, "dynamic", pattern)
        with errors_of(f"dynamic: {key}"):
            scheme = None if key.startswith("-:") else parse_gptq(fields, raw | changes)
        rules.append(Rule(f"{PATTERN}{pattern}", scheme))
    rules.append(Rule(ALL_LINEAR, parse_gptq(fields, raw)))
    head = () if raw.get("lm_head") else ("lm_head",)
    return Schemes(tuple(rules), (*head, *_unnamed_in_blocks(fields, raw)))


def _unnamed_in_blocks(fields: Fields, raw: dict[str, Any]) -> tuple[str, ...]:
    """Returns a pattern of the layers that transformers' `modules_in_block_to_quantize` does not name: lists of parts
    of layers' names.
    """
    key = "modules_in_block_to_quantize"
    lists = raw.get(key)
    if not lists:
        return ()
    if not isinstance(lists, list) or not all(isinstance(each, list) for each in lists):
        raise refuse(fields, key, "it must be a list of lists of names")
    named = "|".join(re.escape(name) for each in lists for name in names(fields, {key: each}, key))
    return (rf"{PATTERN}(?!lm_head$|.*\.(?:{named})$)",)


def _modelopt_file(fields: Fields) -> Fields | None:
    """Returns hf_quant_config.json, if there is one, of modelopt's first checkpoints, whose config.json
    says nothing.
    """
    path = fields.path.parent / _MODELOPT_FILE
    if not path.is_file():
        return None
    file = Fields.read(path)
    raw = file.values.get("quantization")
    if not isinstance(raw, dict):
        raise file.refuse("quantization", "must be an object.")
    return Fields(path, raw)


def _parse_modelopt(fields: Fields, raw: dict[str, Any], ignored: tuple[str, ...]) -> Schemes | None:
    """Returns the schemes; None if keys and values alone are quantised."""
    if not raw.get("quant_algo"):
        return None
    if _algorithm(raw) != "MIXED_PRECISION":
        return Schemes.of_all(_modelopt_scheme(fields, raw), ignored)
    layers = raw.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(own, dict) for own in layers.values()) or not layers:
        raise refuse(fields, "quantized_layers", "with MIXED_PRECISION it must be an object of layers")
    rules = []
    for layer, own in layers.items():
        with errors_of(f"quantized_layers: {layer}"):
            rules.append(Rule(layer, _modelopt_scheme(fields, own)))
    return Schemes(tuple(rules), ignored)


def _modelopt_scheme(fields: Fields, raw: dict[str, Any]) -> Scheme:
    """Returns the scheme of all layers, or of one."""
    if _algorithm(raw) in ("NVFP4", "W4A16_NVFP4"):
        return parse_modelopt_fp4(fields, raw)
    if _algorithm(raw) == "FP8":
        return Fp8Scheme("tensor", (0, 0), "weight_scale")
    supported = "of modelopt NVFP4, W4A16_NVFP4, FP8 and MIXED_PRECISION of these are supported"
    raise refuse(fields, f"quant_algo = {raw.get('quant_algo')!r}", supported)


def _algorithm(raw: dict[str, Any]) -> str:
    return str(raw.get("quant_algo")).upper()
