"""`quantization_config` of checkpoints with 4-bit floats: NVFP4 and MXFP4, and NVIDIA's modelopt, which writes NVFP4.

After compressed-tensors' formats `nvfp4-pack-quantized` and `mxfp4-pack-quantized`, and modelopt's
hf_quant_config.json. No torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.quantization.fields import refuse

Fp4Form = Literal["nvfp4-pack-quantized", "mxfp4-pack-quantized", "modelopt"]
_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """Weights as 4-bit floats (E2M1), two a byte, with a scale for each row and group of columns."""

    form: Fp4Form
    """How tensors are called; and in modelopt's form the scale of the whole tensor multiplies, elsewhere it divides."""
    group_size: int
    """16: scales are e4m3, and the tensor has one more. 32: scales are powers of two."""

    @property
    def name(self) -> str:
        """For people."""
        return "nvfp4" if self.group_size == 16 else "mxfp4"


def parse_compressed_fp4(fields: Fields, form: Any, weights: dict[str, Any]) -> Fp4Scheme:
    """Of compressed-tensors: `weights` is that of one of its groups. ModelError: it is a form that is not supported."""
    if form not in _GROUPS:
        raise refuse(fields, f"format = {form!r}", f"of 4-bit floats {' and '.join(_GROUPS)} are supported")
    if (group := weights.get("group_size")) != _GROUPS[form]:
        raise refuse(fields, f"group_size = {group!r}", f"of {form} it must be {_GROUPS[form]}")
    return Fp4Scheme(form, _GROUPS[form])


def parse_modelopt_fp4(fields: Fields, raw: dict[str, Any]) -> Fp4Scheme:
    """Of modelopt: `raw` is what says `quant_algo`. ModelError: it is a form that is not supported."""
    group = raw.get("group_size", 16)
    if group != 16:
        raise refuse(fields, f"group_size = {group!r}", "of NVFP4 it must be 16")
    return Fp4Scheme("modelopt", 16)
