"""W8A8 GEMM of FP8 weights with scales of 128 columns, as DeepSeek-V3's (arXiv 2412.19437, section 3.3).

Rows of x are rounded to e4m3 with a scale for the same 128 columns. A step's products, which Hopper's tensor cores
accumulate with few bits, are added in fp32 with both scales. In Triton; operands are read by TMA if available.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.gemm_config import W8A8GemmConfig
from mini_infer_engine.kernels.gemm.quantized_gemm import in_order
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP, QuantizedWeight
from mini_infer_engine.kernels.gemm.w8a8_tiles import GROUP_M, descriptor, store_tile, tile_of_program
from mini_infer_engine.kernels.sizes import cdiv

_LARGEST = tl.constexpr(448.0)


@triton.jit
def _round_groups(x, out, scales, K, x_stride, out_stride, GROUPS: tl.constexpr):
    """Rounds one row: a program per (row, GROUPS groups of 128). Each group is multiplied by 448 / its maximum.

    Columns are stored in the weights' order.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    place = first * 128 + tl.arange(0, GROUPS * 128)
    values = tl.load(x + row * x_stride + place, mask=place < K, other=0.0).to(tl.float32)
    groups = tl.reshape(values, (GROUPS, 128))
    scale = tl.maximum(tl.max(tl.abs(groups), axis=1) / _LARGEST, 1e-12)
    ordered = in_order(tl.reshape(groups / scale[:, None], (GROUPS * 128,)), 8, GROUPS * 128)
    tl.store(out + row * out_stride + place, ordered.to(out.dtype.element_ty), mask=place < out_stride)
    group = first + tl.arange(0, GROUPS)
    tl.store(scales + row * (out_stride // 128) + group, scale, mask=group < out_stride // 128)


def rounded_groups_of_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x [M, K] as e4m3 [M, padded K] in the order of 8-bit weights, and fp32 scales [M, groups of columns]."""
    m, k = x.shape
    assert x.stride(1) == 1
    width = cdiv(k, GROUP) * GROUP
    out = torch.empty((m, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((m, width // GROUP), dtype=torch.float32, device=x.device)
    groups = 8
    _round_groups[(m, cdiv(width, groups * GROUP))](x, out, scales, k, x.stride(0), width, GROUPS=groups, num_warps=4)
    return out, scales


@triton.jit(do_not_specialize=["M"])
def _fp8_block_gemm(
    x,
    weight,
    x_scales,
    scales,
    bias,
    out,
    M,
    N,
    groups,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Computes one tile of x @ weight.T, group after group."""
    m0, n0 = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    mask_m, mask_n = m < M, n < N
    of_rows = x_scales + m.to(tl.int64) * groups
    row_scales = tl.load(of_rows, mask=mask_m, other=0.0)
    column_scales = tl.load(scales + n, mask=mask_n, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        following = min(group + 1, groups - 1)  # scales of the next group arrive while this one is multiplied
        next_row_scales = tl.load(of_rows + following, mask=mask_m, other=0.0)
        next_column_scales = tl.load(scales + following.to(tl.int64) * N + n, mask=mask_n, other=0.0)
        products = tl.dot(x.load([m0, group * 128]), weight.load([n0, group * 128]).T)
        acc += products * row_scales[:, None] * column_scales[None, :]
        row_scales, column_scales = next_row_scales, next_column_scales
    store_tile(acc, bias, out, out_stride, m, n, mask_m, mask_n)


def fp8_block_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    config: W8A8GemmConfig,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x [M, K] @ weight.T + bias: [M, N], in x's dtype, in `out` if given; groups of x are rounded to FP8."""
    m, n = x.shape[0], weight.shape[0]
    assert config.block_k == GROUP
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not m:
        return out
    values, x_scales = rounded_groups_of_rows(x)
    _fp8_block_gemm[(cdiv(m, config.block_m) * cdiv(n, config.block_n),)](
        descriptor(values, config.block_m, GROUP),
        descriptor(weight.values, config.block_n, GROUP),
        x_scales,
        weight.scales,
        bias,
        out,
        m,
        n,
        x_scales.shape[1],
        out.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP_M=GROUP_M,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out
