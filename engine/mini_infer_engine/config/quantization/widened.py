"""Reads which quantised checkpoints are dequantised when they are loaded, whose layers are unquantised ones then: MLX's
affine groups, and bitsandbytes' 4 and 8 bits. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mini_infer_engine.config.json_fields import Fields

_BNB_FLAGS = ("load_in_4bit", "load_in_8bit")


@dataclass(frozen=True, slots=True)
class WidenedForm:
    """The form of a checkpoint."""

    kind: Literal["mlx", "bitsandbytes"]
    group_size: int = 0
    """Columns of a row that share a scale and a bias, in MLX's form."""
    group_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Those of layers that differ, by the checkpoint's names of the layers."""


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
    if method is None and _is_affine(raw):
        others = {name: each["group_size"] for name, each in raw.items() if isinstance(each, dict) and _is_affine(each)}
        return WidenedForm("mlx", raw["group_size"], others)
    return None


def _is_affine(raw: dict[str, Any]) -> bool:
    """True for MLX's groups with a scale and a bias: its other modes are floats."""
    sizes = raw.get("group_size"), raw.get("bits")
    return raw.get("mode", "affine") == "affine" and all(isinstance(size, int) and size > 0 for size in sizes)
