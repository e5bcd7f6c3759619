"""SwiGLU's gated activation (Shazeer, arXiv:2002.05202): silu(gate) * up, from the packed output of one GEMM."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv


@triton.jit
def _silu_mul(packed, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    gate = tl.load(packed + row * 2 * width + offsets, mask=mask).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + offsets, mask=mask).to(tl.float32)
    tl.store(out + row * width + offsets, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """Maps [rows, 2 * width], with gate first, to silu(gate) * up [rows, width]."""
    rows, width = packed.shape[0], packed.shape[1] // 2
    out = torch.empty((rows, width), dtype=packed.dtype, device=packed.device)
    if rows:
        _silu_mul[(rows, cdiv(width, 1024))](packed, out, width, BLOCK=1024, num_warps=4)
    return out
