"""Reads `quantization_config` of checkpoints with 4-bit floats: NVFP4 and MXFP4, NVIDIA's modelopt, which writes NVFP4,
and gpt-oss's MXFP4 (`quant_method` mxfp4, transformers' Mxfp4Config), which is of experts stored as one tensor.

Follows compressed-tensors' formats `nvfp4-pack-quantized` and `mxfp4-pack-quantized`, and modelopt's
hf_quant_config.json. No torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.quantization.fields import refuse

Fp4Form = Literal["nvfp4-pack-quantized", "mxfp4-pack-quantized", "modelopt", "mxfp4"]
MX_EXPERTS = r".*\.experts$"
"""The expression for layers that `quant_method` mxfp4 quantises: all experts of a mixture together."""
_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """Weights as 4-bit floats (E2M1), two a byte, with a scale for each row and group of columns."""

    form: Fp4Form
    """Form of the checkpoint, which decides the names of tensors; in modelopt's form the scale of the whole tensor
    multiplies, elsewhere it divides.
    """
    group_size: int
    """Columns of a row that share a scale. With 16 scales are e4m3, and the tensor has one more; with 32 they are
    powers of two.
    """

    @property
    def name(self) -> str:
        """The scheme's name in messages."""
        return "nvfp4" if self.group_size == 16 else "mxfp4"


def parse_compressed_fp4(fields: Fields, form: Any, weights: dict[str, Any]) -> Fp4Scheme:
    """Returns the scheme of a group of compressed-tensors, whose `weights` these are. Raises ModelError for an
    unsupported form.
    """
    if form not in _GROUPS:
        raise refuse(fields, f"format = {form!r}", f"of 4-bit floats {' and '.join(_GROUPS)} are supported")
    if (group := weights.get("group_size")) != _GROUPS[form]:
        raise refuse(fields, f"group_size = {group!r}", f"of {form} it must be {_GROUPS[form]}")
    return Fp4Scheme(form, _GROUPS[form])


def parse_modelopt_fp4(fields: Fields, raw: dict[str, Any]) -> Fp4Scheme:
    """Returns the scheme of modelopt; `raw` is the object with `quant_algo`. Raises ModelError for an
    unsupported form.
    """
    group = raw.get("group_size", 16)
    if group != 16:
        raise refuse(fields, f"group_size = {group!r}", "of NVFP4 it must be 16")
    return Fp4Scheme("modelopt", 16)
