"""Quantises keys and values to one byte an element, with a scale for each token and head: the kernels do the same.

A scale depends on its own token's head alone, so that it never changes, whatever is written later, and a token reads
the same however its prompt was cut into chunks.
"""

import torch
from torch import Tensor

from mini_infer_engine.models.kv_spec import SCALE_DTYPE, KVQuantization

SMALLEST_SCALE = 2.0**-100
"""Scale of heads that are all zeros, so that nothing is divided by zero."""


def quantize_rows(x: Tensor, kind: KVQuantization) -> tuple[Tensor, Tensor]:
    """Returns values [..., head_dim] in the kind's dtype and scales [...] of x [..., head_dim]."""
    wide = x.float()
    scales = _rounded_up(wide.abs().amax(-1) * (1 / kind.largest)).clamp_min_(SMALLEST_SCALE)
    values = (wide / scales.unsqueeze(-1)).clamp_(-kind.largest, kind.largest)
    if not kind.dtype.is_floating_point:
        values.round_()
    return values.to(kind.dtype), scales.to(SCALE_DTYPE)


def dequantize_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values with which attention computes: [..., head_dim] in `dtype`."""
    return (values.float() * scales.float().unsqueeze(-1)).to(dtype)


def _rounded_up(x: Tensor) -> Tensor:
    """Rounds up to bfloat16, still in fp32, so that no value exceeds the largest."""
    return ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
