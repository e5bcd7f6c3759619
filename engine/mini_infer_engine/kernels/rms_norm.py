"""RMSNorm of many rows, one read and one write each (Zhang and Sennrich, arXiv:1910.07467)."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _rms_norm(x, weight, out, x_stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row of x [rows, width] over its root mean square, times weight [width]; statistics in fp32."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = next_power_of_2(width)
    if rows:
        _rms_norm[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            width,
            eps,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
    return out
