"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467), with or without a residual sum before it: one read and one write."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _rms_norm(
    x,
    summands,
    weight,
    out,
    x_stride,
    summand_stride,
    out_stride,
    width,
    eps,
    SUMMANDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    values = tl.load(x + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    if SUMMANDS:
        for index in tl.static_range(SUMMANDS):
            summand_at = summands + index * summand_stride + row * width + offsets
            values += tl.load(summand_at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + offsets, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    tl.store(out + row * out_stride + offsets, (values * scale * weights).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Divides each row of x [rows, width] by its root mean square, and multiplies by weight [width], in fp32.

    Rows of x and of `out`, which may be x itself, may be strided.
    """
    return _run(x, None, weight, eps, out)


def add_rms_norm(x: torch.Tensor, summands: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds all summands [n, rows, width] to x [rows, width] in place, in fp32, and returns the `rms_norm` of that."""
    return _run(x, summands, weight, eps, None)


def _run(
    x: torch.Tensor, summands: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> torch.Tensor:
    rows, width = x.shape
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = next_power_of_2(width)
    if rows:
        _rms_norm[(rows,)](
            x,
            x if summands is None else summands,
            weight,
            out,
            x.stride(0),
            rows * width,
            out.stride(0),
            width,
            eps,
            SUMMANDS=0 if summands is None else summands.shape[0],
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
    return out
