"""Dispatches the small-M GEMMs of a decode step, whose time is that of reading the weights once, to three kernels.

Bias, SwiGLU, residual sum and RMSNorm are fused into their epilogues. The norm is deferred: the kernel that writes the
residual also writes it times the norm's weights, and its sums of squares; the GEMM that reads those scales its result.
(A reduction in the GEMM that reads would break the pipeline of its loads: qkv of 7B on an H200, 28 us against 11.) The
config's type selects the kernel: pdl_gemm on Hopper; elsewhere, and where K is odd, small_m_gemm or stream_k_gemm by M.
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
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.gemm.small_m_gemm import launch_small_m_gemm
from mini_infer_engine.kernels.gemm.stream_k_gemm import launch_stream_k_gemm
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace


def small_m_linear(
    x: torch.Tensor | DeferredRMSNorm,
    weight: torch.Tensor | QuantizedWeight,
    config: SmallMConfig | PdlGemmConfig,
    *,
    workspace: Workspace,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `x @ weight.T [+ bias] [gated] [+ residual]` for x [M <= MAX_M, K], weight [N, K].

    gated: weight is [2 * N, K], gate first, and the result silu(gate) * up [M, N].
    """
    return _launch(x, weight, config, bias, residual, gated, None, workspace, out)[0]


def small_m_linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    config: SmallMConfig | PdlGemmConfig,
    *,
    workspace: Workspace,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, DeferredRMSNorm]:
    """Returns `residual + x @ weight.T [+ bias]`, and its deferred RMSNorm for the next GEMM."""
    out, scaled, sums = _launch(x, weight, config, bias, residual, False, norm_weight, workspace)
    assert sums is not None
    return out, DeferredRMSNorm(scaled, sums, eps)


def _launch(
    x: torch.Tensor | DeferredRMSNorm,
    weight: torch.Tensor | QuantizedWeight,
    config: SmallMConfig | PdlGemmConfig,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    next_norm: torch.Tensor | None,
    workspace: Workspace,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the results, the results times the next norm's weights, and their sums of squares.

    Without a next norm the second are the results, and the third is None.
    """
    values, square_sums, eps = (x.values, x.square_sums, x.eps) if isinstance(x, DeferredRMSNorm) else (x, None, 0.0)
    m, k = values.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = portable_block_m(m)
    if out is None:
        out = torch.empty((m, n), dtype=values.dtype, device=values.device)
    scaled, sums = out, None
    if next_norm is not None:
        scaled = torch.empty_like(out)
        sums = torch.empty((cdiv(n, config.block_n), block_m), dtype=torch.float32, device=out.device)
    parts = 0 if square_sums is None else square_sums.shape[0]
    options: dict[str, Any] = {
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
        "PARTS": next_power_of_2(parts) if parts else 0,
        "NEXT_NORM": next_norm is not None,
    }
    epilogue = (bias, residual, square_sums, next_norm, out, scaled, sums)
    sizes, norm = (m, n, k), (parts, eps)
    if m and isinstance(config, PdlGemmConfig):
        from mini_infer_engine.kernels.gemm.pdl_gemm import launch_pdl_gemm  # not every Triton has its Gluon

        launch_pdl_gemm(values, weight, epilogue, sizes, norm, config, options, workspace)
    elif m and isinstance(config, SmallMConfig):
        assert isinstance(weight, torch.Tensor), "quantised weights are pdl_gemm's and quantized_gemm's"
        options |= {
            "BLOCK_M": block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "PRECISION": "ieee" if values.dtype == torch.float32 else "tf32",
            "num_warps": config.warps,
            "num_stages": config.stages,
        }
        launch = launch_small_m_gemm if block_m == SMALL_M else launch_stream_k_gemm
        launch(values, weight, epilogue, sizes, norm, config, options, workspace)
    return out, scaled, sums
