"""Reads `quantization_config` of checkpoints with integer weights: GPTQ, AWQ, and compressed-tensors' W8A8, W8A16 and
W4A16.

Follows autoawq's, gptqmodel's and compressed-tensors' documented formats. No torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.quantization.fields import refuse

Form = Literal["pack-quantized", "int-quantized", "gptq", "awq"]


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """Weights as integers of a few bits with scales, dequantised when they are loaded."""

    form: Form
    """Layout of integers, scales and zero points."""
    bits: int
    group_size: int
    """Columns of a row that share a scale; 0: all of them."""
    symmetric: bool
    """True if zero points are in the middle, and not stored (GPTQ stores them nevertheless)."""
    act_order: bool
    """True if each column says its group (`g_idx`): GPTQ quantised them in another order."""
    zero_offset: int
    """Number added to stored zero points: GPTQ's first format has them less one."""
    tensor_scale: bool = False
    """True if the whole tensor has one scale."""
    int8_activations: bool = False
    """True if it was made for W8A8: where kernels gain by it, activations become int8 with a dynamic scale a row."""

    @property
    def name(self) -> str:
        """The scheme's name in messages."""
        kind = {"gptq": "gptq ", "awq": "awq "}.get(self.form, "") + f"int{self.bits}"
        return f"{kind} by groups of {self.group_size}" if self.group_size else kind


def parse_compressed_integers(
    fields: Fields, form: Any, group: dict[str, Any], weights: dict[str, Any]
) -> IntegerScheme:
    """Returns the scheme of a `group` of compressed-tensors, whose `weights` these are.

    Raises ModelError for an unsupported form.
    """
    if form not in ("pack-quantized", "int-quantized"):
        raise refuse(fields, f"format = {form!r}", "of integers pack-quantized and int-quantized are supported")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if bits not in ((8,) if form == "int-quantized" else (4, 8)):
        raise refuse(fields, f"weights of {bits} bits as {form}", "supported are 8 bits, and 4 where they are packed")
    if strategy not in ("tensor", "channel", "group"):
        raise refuse(fields, f"strategy = {strategy!r}", "of integers tensor, channel and group are supported")
    group_size = _group_size(fields, weights.get("group_size"), 1) if strategy == "group" else 0
    return IntegerScheme(
        form=form,
        bits=int(bits or 0),
        group_size=group_size,
        symmetric=bool(weights.get("symmetric", True)),
        act_order=weights.get("actorder") in ("group", "dynamic", True),
        zero_offset=0,
        tensor_scale=strategy == "tensor",
        int8_activations=_has_int8_activations(group),
    )


def _has_int8_activations(group: dict[str, Any]) -> bool:
    activations = group.get("input_activations")
    if not isinstance(activations, dict):
        return False
    return (activations.get("type", "int"), activations.get("num_bits")) == ("int", 8)


def parse_gptq(fields: Fields, raw: dict[str, Any]) -> IntegerScheme:
    """Returns the scheme of a checkpoint of gptqmodel or AutoGPTQ."""
    form = raw.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise refuse(fields, f"checkpoint_format = {form!r}", "supported are gptq and gptq_v2")
    return IntegerScheme(
        form="gptq",
        bits=_bits(fields, raw, (4, 8)),
        group_size=_group_size(fields, raw.get("group_size", 128), 32),
        symmetric=False,
        act_order=bool(raw.get("desc_act", False)),
        zero_offset=1 if form == "gptq" else 0,
    )


def parse_awq(fields: Fields, raw: dict[str, Any]) -> IntegerScheme:
    """Returns the scheme of a checkpoint of autoawq, in the layout "gemm"."""
    version = str(raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise refuse(fields, f"version = {version!r}", "supported is gemm")
    return IntegerScheme(
        form="awq",
        bits=_bits(fields, raw, (4,)),
        group_size=_group_size(fields, raw.get("group_size", raw.get("q_group_size", 128)), 32),
        symmetric=not raw.get("zero_point", True),
        act_order=False,
        zero_offset=0,
    )


def _bits(fields: Fields, raw: dict[str, Any], supported: tuple[int, ...]) -> int:
    bits = raw.get("bits", raw.get("w_bit"))
    if bits not in supported:
        raise refuse(fields, f"bits = {bits!r}", f"supported are {' and '.join(map(str, supported))}")
    return int(bits)


def _group_size(fields: Fields, value: Any, least: int) -> int:
    """Returns the columns of a group; 0 for -1, which is the whole row."""
    if value == -1:
        return 0
    if not isinstance(value, int) or value < least:
        raise refuse(fields, f"group_size = {value!r}", f"it must be -1 or at least {least}")
    return value
