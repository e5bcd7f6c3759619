"""Reads which quantised checkpoints are dequantised when they are loaded, whose layers are unquantised ones then: MLX's
affine groups, bitsandbytes' 4 and 8 bits, and HQQ's integers. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mini_infer_engine.config.json_fields import Fields

HQQ_BITS = (8, 4, 2)
"""Widths of HQQ's integers that share bytes; those of 3 bits are packed into words of ten."""
_BNB_FLAGS = ("load_in_4bit", "load_in_8bit")


@dataclass(frozen=True, slots=True)
class WidenedForm:
    """The form of a checkpoint."""

    kind: Literal["mlx", "bitsandbytes", "hqq"]
    group_size: int = 0
    """Columns of a row that share a scale and a bias, in MLX's form."""
    group_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Group sizes of layers that differ, by the checkpoint's names of the layers."""


def widened_form(fields: Fields) -> WidenedForm | None:
    """Returns the form, or None if the weights are not quantised, or stay packed, or are not read."""
    raw = fields.values.get("quantization_config")
    if raw is None:
        raw = fields.values.get("quantization")
    if not isinstance(raw, dict):
        return None
    method = raw.get("quant_method")
    if method == "bitsandbytes" and any(raw.get(flag) is True for flag in _BNB_FLAGS):
        return WidenedForm("bitsandbytes")
    if method == "hqq" and _has_plain_integers(raw):
        return WidenedForm("hqq")
    if method is None and _is_affine(raw):
        others = {name: each["group_size"] for name, each in raw.items() if isinstance(each, dict) and _is_affine(each)}
        return WidenedForm("mlx", raw["group_size"], others)
    return None


def _has_plain_integers(raw: dict[str, Any]) -> bool:
    """True for HQQ's integers that share bytes, and whose scales and zeros are floats."""
    config = raw.get("quant_config")
    weights = config.get("weight_quant_params") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(weights, dict) or weights.get("nbits") not in HQQ_BITS:
        return False
    return not config.get("scale_quant_params") and not config.get("zero_quant_params")


def _is_affine(raw: dict[str, Any]) -> bool:
    """True for MLX's groups with a scale and a bias: its other modes are floats."""
    sizes = raw.get("group_size"), raw.get("bits")
    return raw.get("mode", "affine") == "affine" and all(isinstance(size, int) and size > 0 for size in sizes)
