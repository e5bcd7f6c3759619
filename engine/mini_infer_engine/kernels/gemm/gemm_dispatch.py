"""Matrix products of few rows, where reading the weights once is all the time there is.

Bias, gated activation, residual sum and RMS norm ride along in the same kernel. The norm is split in two: who
writes the residual stream also writes it times the norm's weights, and its sums of squares; the product that reads
those scales its result. (Summing in the reading product breaks the pipeline of loads: 7B qkv on an H200, 28 us
against 11.) The cut says which of three kernels computes it: on Hopper pdl_gemm's, elsewhere and of odd widths two
that differ by their rows. Each is launched in its own file.
"""

from typing import Any

import torch

from mini_infer_engine.kernels.gemm.gemm_config import (
    SMALL_M,
    DeferredRMSNorm,
    PdlGemmConfig,
    SmallMConfig,
    portable_block_m,
)
from mini_infer_engine.kernels.gemm.small_m_gemm import launch_small_m_gemm
from mini_infer_engine.kernels.gemm.stream_k_gemm import launch_stream_k_gemm
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace


def small_m_linear(
    x: torch.Tensor | DeferredRMSNorm,
    weight: torch.Tensor,
    config: SmallMConfig | PdlGemmConfig,
    *,
    workspace: Workspace,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T [+ bias] [gated] [+ residual]` for x [rows <= MAX_M, width], weight [columns, width].

    gated: weight is [2 * columns, width], gate first, and the result silu(gate) * up [rows, columns].
    """
    return _launch(x, weight, config, bias, residual, gated, None, workspace, out)[0]


def small_m_linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SmallMConfig | PdlGemmConfig,
    *,
    workspace: Workspace,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, DeferredRMSNorm]:
    """`residual + x @ weight.T [+ bias]`, and that half normed for the product that comes next."""
    out, scaled, sums = _launch(x, weight, config, bias, residual, False, norm_weight, workspace)
    assert sums is not None
    return out, DeferredRMSNorm(scaled, sums, eps)


def _launch(
    x: torch.Tensor | DeferredRMSNorm,
    weight: torch.Tensor,
    config: SmallMConfig | PdlGemmConfig,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    next_norm: torch.Tensor | None,
    workspace: Workspace,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Results, the same times the next norm's weights, their sums of squares (without a next norm: results, None)."""
    values, square_sums, eps = (x.values, x.square_sums, x.eps) if isinstance(x, DeferredRMSNorm) else (x, None, 0.0)
    rows, width = values.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    row_block = portable_block_m(rows)
    if out is None:
        out = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    scaled, sums = out, None
    if next_norm is not None:
        scaled = torch.empty_like(out)
        sums = torch.empty((cdiv(columns, config.block_n), row_block), dtype=torch.float32, device=out.device)
    parts = 0 if square_sums is None else square_sums.shape[0]
    options: dict[str, Any] = {
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
        "PARTS": next_power_of_2(parts) if parts else 0,
        "NEXT_NORM": next_norm is not None,
    }
    ends = (bias, residual, square_sums, next_norm, out, scaled, sums)
    sizes, norm = (rows, columns, width), (parts, eps)
    if rows and isinstance(config, PdlGemmConfig):
        from mini_infer_engine.kernels.gemm.pdl_gemm import launch_pdl_gemm  # not every Triton has its Gluon

        launch_pdl_gemm(values, weight, ends, sizes, norm, config, options, workspace)
    elif rows and isinstance(config, SmallMConfig):
        options |= {
            "BLOCK_M": row_block,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "PRECISION": "ieee" if values.dtype == torch.float32 else "tf32",
            "num_warps": config.warps,
            "num_stages": config.stages,
        }
        launch = launch_small_m_gemm if row_block == SMALL_M else launch_stream_k_gemm
        launch(values, weight, ends, sizes, norm, config, options, workspace)
    return out, scaled, sums
