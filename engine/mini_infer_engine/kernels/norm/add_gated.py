"""Adds rows that the sigmoid of a product weighs, as those of Qwen2-MoE's shared expert (arXiv 2407.10671)."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _add_gated(total, total_stride, made, made_stride, x, x_stride, weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Computes one row with one program."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    inputs = tl.load(x + row * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    dtype = total.dtype.element_ty
    logit = tl.sum(inputs * tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32), axis=0)
    gate = tl.sigmoid(logit.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    added = tl.load(made + row * made_stride + offs, mask=mask, other=0.0).to(tl.float32) * gate
    place = total + row * total_stride + offs
    before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (before + added.to(dtype).to(tl.float32)).to(dtype), mask=mask)


def add_gated(total: torch.Tensor, made: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Adds made * sigmoid(x @ weight.T) to total in place: all [rows, width], and weight [1, width]."""
    rows, width = total.shape
    if rows:
        _add_gated[(rows,)](
            total,
            total.stride(0),
            made,
            made.stride(0),
            x,
            x.stride(0),
            weight,
            WIDTH=width,
            BLOCK=next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
        )
