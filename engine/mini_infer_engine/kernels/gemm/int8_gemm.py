"""W8A8 GEMM: int8 rows by int8 weights on integer tensor cores, with both scales and the bias in the epilogue.

torch._int_mm would write its sums as int32, twice the bytes of the result in bf16, for a second kernel to scale. Rows
are rounded and brought into the weights' order of columns by `quantized_gemm.reordered` before. In Triton; operands are
read by TMA if available.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.gemm_config import W8A8GemmConfig
from mini_infer_engine.kernels.gemm.quantized_gemm import reordered
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.gemm.w8a8_tiles import GROUP_M, descriptor, store_tile, tile_of_program
from mini_infer_engine.kernels.sizes import cdiv


@triton.jit(do_not_specialize=["M"])
def _int8_gemm(
    x,
    weight,
    x_scales,
    scales,
    bias,
    out,
    M,
    N,
    K,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Computes one tile of x @ weight.T; K is padded to whole steps."""
    m0, n0 = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        acc = tl.dot(x.load([m0, start]), weight.load([n0, start]).T, acc, out_dtype=tl.int32)
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    mask_m, mask_n = m < M, n < N
    row_scales = tl.load(x_scales + m, mask=mask_m, other=0.0)
    column_scales = tl.load(scales + n, mask=mask_n, other=0.0)
    result = acc.to(tl.float32) * row_scales[:, None] * column_scales[None, :]
    store_tile(result, bias, out, out_stride, m, n, mask_m, mask_n)


def int8_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    config: W8A8GemmConfig,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x [M, K] @ weight.T + bias: [M, N], in x's dtype, in `out` if given; rows of x are rounded to int8."""
    m, n = x.shape[0], weight.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not m:
        return out
    values, x_scales = reordered(x, weight, to=torch.int8)
    _int8_gemm[(cdiv(m, config.block_m) * cdiv(n, config.block_n),)](
        descriptor(values, config.block_m, config.block_k),
        descriptor(weight.values, config.block_n, config.block_k),
        x_scales,
        weight.scales,
        bias,
        out,
        m,
        n,
        values.shape[1],
        out.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=GROUP_M,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out
