"""Multiplies with silu of gates and normalises equal parts of each row: the norm of Mamba-2 (arXiv 2405.21060)."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _gated_rms_norm(
    x, x_stride, gates, gates_stride, weight, out, out_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalises one part with one program per (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < SIZE
    columns = tl.program_id(1) * SIZE + offs
    gate = tl.load(gates + row * gates_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = value * gate / (1.0 + tl.exp(-gate))
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    dtype = out.dtype.element_ty
    scaled = normed.to(dtype).to(tl.float32) * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, scaled.to(dtype), mask=mask)


def gated_rms_norm(
    x: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """Returns norm(x * silu(gates)) * weight [rows, width], with a norm for each of `num_groups` parts of a row."""
    rows, width = x.shape
    size = width // num_groups
    out = torch.empty((rows, width), dtype=gates.dtype, device=x.device)
    if rows:
        _gated_rms_norm[(rows, num_groups)](
            x,
            x.stride(0),
            gates,
            gates.stride(0),
            weight,
            out,
            out.stride(0),
            eps,
            SIZE=size,
            BLOCK=next_power_of_2(size),
            num_warps=4 if size <= 2048 else 8,
        )
    return out
