"""Refuses quantised checkpoints in forms that are not read: it names the form, and what to use instead. No torch."""

import json
from typing import Any, Literal

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields

READ = "fp8, compressed-tensors, gptq, awq, modelopt or mxfp4"
"""The values of `quant_method` that are read."""
_NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FBGEMM",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "quanto": "quanto",
    "quark": "Quark",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Libraries by the `quant_method` of their checkpoints."""
_EXPORTS = {
    "auto-round": "--format auto_gptq or auto_awq",
    "quark": "its export to Hugging Face's fp8 or awq form",
}
"""The export by which each library writes a form that is read."""


def refuse_unread(fields: Fields, raw: dict[str, Any]) -> ModelError:
    """Returns the error for a `quantization_config` in a form that is not read."""
    return _error(fields, form_of(raw), raw, _EXPORTS.get(str(raw.get("quant_method")), ""))


def form_of(raw: dict[str, Any]) -> str:
    """Returns a clause that names the form of a `quantization_config`."""
    method = raw.get("quant_method")
    if method is None and {"bits", "group_size"} <= raw.keys():
        return f"bits = {raw['bits']!r}, group_size = {raw['group_size']!r} without a quant_method (MLX's form)"
    name = _NAMES.get(str(method))
    return f"quant_method = {method!r}" if name is None else f"quant_method = {method!r} ({name}'s form)"


def refuse_mlx(fields: Fields) -> None:
    """Raises ModelError for MLX's checkpoints of before it wrote `quantization_config`, too."""
    raw = fields.values.get("quantization")
    if isinstance(raw, dict) and {"bits", "group_size"} <= raw.keys():
        raise _error(fields, f"quantization = {raw!r} (MLX's form)", raw, "")


def _error(fields: Fields, what: str, raw: dict[str, Any], export: str) -> ModelError:
    kind = quantization_like(raw)
    other = f" ({export})" if export else ""
    return ModelError(
        f"{fields.path}: quantization_config: {what}, which is not read: use the original weights with "
        f"--quantization {kind}, or a checkpoint whose quant_method is {READ}{other}."
    )


def quantization_like(raw: dict[str, Any]) -> Literal["int4", "int8", "fp8"]:
    """Returns the value of `--quantization` that takes as many bits as these weights, or the next one that exists."""
    words = json.dumps(raw, default=str).lower()
    if "fp8" in words or "float8" in words or "f8e4m3" in words:
        return "fp8"
    bits = [value for key, value in _items(raw) if key in ("bits", "nbits", "num_bits")]
    if raw.get("load_in_8bit") or 8 in bits or raw.get("weights") == "int8" or "int8weight" in words:
        return "int8"
    return "int4"


def _items(value: Any) -> list[tuple[str, Any]]:
    """Returns all keys with their values, those of nested objects, too."""
    if not isinstance(value, dict):
        return []
    return [(str(key), each) for key, each in value.items()] + [
        item for each in value.values() for item in _items(each)
    ]
