"""Batched GEMV for experts of one token: one matrix-vector product for each (token, expert) pair.

It needs no lists of each expert's tokens. From two tokens on grouped GEMM is faster (`expert_tiles`).
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.grouped_weight_gemm import expert_operands, widened_tile
from mini_infer_engine.kernels.moe.gated import gated
from mini_infer_engine.kernels.moe.route import Routing
from mini_infer_engine.kernels.sizes import cdiv

# Of two shapes' choices on an H200, those that are near the best for both.
_PLAIN_GATED = {"BLOCK_N": 4, "BLOCK_K": 512, "num_warps": 2, "num_stages": 3}
_PLAIN_DOWN = {"BLOCK_N": 2, "BLOCK_K": 256, "num_warps": 1, "num_stages": 4}
_QUANTISED_GATED = {"BLOCK_N": 2, "BLOCK_K": 512, "num_warps": 2, "num_stages": 3}
_QUANTISED_DOWN = {"BLOCK_N": 4, "BLOCK_K": 256, "num_warps": 2, "num_stages": 3}


@triton.jit
def _gate_up(
    x,
    experts,
    weight,
    scales,
    zeros,
    factors,
    bias,
    out,
    K,
    N,
    row_bytes,
    groups,
    x_stride,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SKIPS: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
):
    """Computes `gated` of x @ gate.T and x @ up.T of one token and one of its experts: one program per (pair, block of
    N).

    SKIPS: an expert below 0 has no weights here, and contributes 0.
    """
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + pair).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    row = expert * (2 * N) + n.to(tl.int64)
    rows = weight + row[:, None] * K + k[None, :]
    source = x + (pair // TOP_K).to(tl.int64) * x_stride + k
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    end = K
    if SKIPS:
        end = tl.where(expert < 0, 0, K)
    for start in range(0, end, BLOCK_K):
        inside = (n < N)[:, None] & (start + k < K)[None, :]
        values = tl.load(source + start, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
        if KIND == "plain":
            gate += tl.load(rows + start, mask=inside, other=0.0).to(tl.float32) * values
            up += tl.load(rows + N.to(tl.int64) * K + start, mask=inside, other=0.0).to(tl.float32) * values
        else:
            gate += values * widened_tile(
                weight, scales, zeros, row, n < N, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K
            )  # fmt: skip
            up += values * widened_tile(
                weight, scales, zeros, row + N, n < N, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K
            )  # fmt: skip
    total_gate, total_up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if factors is not None:
        has_factors = (n < N) & (expert >= 0)  # in front of the first expert's there may be anything
        total_gate *= tl.load(factors + row, mask=has_factors, other=0.0)
        total_up *= tl.load(factors + row + N, mask=has_factors, other=0.0)
    if bias is not None:
        has_bias = (n < N) & (expert >= 0)
        total_gate += tl.load(bias + row, mask=has_bias, other=0.0).to(tl.float32)
        total_up += tl.load(bias + row + N, mask=has_bias, other=0.0).to(tl.float32)
    total_gate = total_gate.to(out.dtype.element_ty).to(tl.float32)
    total_up = total_up.to(out.dtype.element_ty).to(tl.float32)
    result = gated(total_gate, total_up, out.dtype.element_ty, LIMIT, GELU)
    tl.store(out + pair.to(tl.int64) * N + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["tokens"])
def _down(
    h,
    experts,
    weights,
    weight,
    scales,
    zeros,
    factors,
    bias,
    out,
    K,
    N,
    row_bytes,
    groups,
    tokens,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SKIPS: tl.constexpr,
):
    """Computes routing weight * (h @ down.T) into the pair's summand: one program per (pair, block of N)."""
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + pair).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    row = expert * N + n.to(tl.int64)
    rows = weight + row[:, None] * K + k[None, :]
    source = h + pair.to(tl.int64) * K + k
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    end = K
    if SKIPS:
        end = tl.where(expert < 0, 0, K)
    for start in range(0, end, BLOCK_K):
        inside = (n < N)[:, None] & (start + k < K)[None, :]
        values = tl.load(source + start, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
        if KIND == "plain":
            acc += tl.load(rows + start, mask=inside, other=0.0).to(tl.float32) * values
        else:
            acc += values * widened_tile(
                weight, scales, zeros, row, n < N, start, K, row_bytes, groups, KIND, GROUP, BLOCK_K
            )  # fmt: skip
    total = tl.sum(acc, axis=1)
    if factors is not None:
        total *= tl.load(factors + row, mask=(n < N) & (expert >= 0), other=0.0)
    if bias is not None:
        total += tl.load(bias + row, mask=(n < N) & (expert >= 0), other=0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty).to(tl.float32) * tl.load(weights + pair)
    place = ((pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K) * N
    tl.store(out + place + n, total.to(out.dtype.element_ty), mask=n < N)


def expert_gemv(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor | GroupedWeight,
    down: torch.Tensor | GroupedWeight,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """Returns the outputs of each token's experts, as summands [top_k, tokens, hidden], for x [tokens, hidden].

    gate_up is [experts, 2 * width, hidden], gate first; down is [experts, hidden, width]. Biases are [experts, rows].
    `swiglu_limit` is that of `MoESpec`; with `gelu` its activation is "gelu_tanh".
    """
    tokens, hidden = x.shape
    top_k, width = routing.experts.shape[1], down.shape[-1]
    pairs = tokens * top_k
    between = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    out = torch.empty((top_k, tokens, hidden), dtype=x.dtype, device=x.device)
    options = {"TOP_K": top_k, "SKIPS": routing.is_local}
    parts, sizes, form = expert_operands(gate_up)
    tile = _PLAIN_GATED if isinstance(gate_up, torch.Tensor) else _QUANTISED_GATED
    _gate_up[(pairs, cdiv(width, tile["BLOCK_N"]))](
        x,
        routing.experts,
        *parts,
        gate_up_bias,
        between,
        hidden,
        width,
        *sizes,
        x.stride(0),
        LIMIT=swiglu_limit or 0.0,
        GELU=gelu,
        **tile,
        **form,
        **options,
    )
    parts, sizes, form = expert_operands(down)
    tile = _PLAIN_DOWN if isinstance(down, torch.Tensor) else _QUANTISED_DOWN
    _down[(pairs, cdiv(hidden, tile["BLOCK_N"]))](
        between,
        routing.experts,
        routing.weights,
        *parts,
        down_bias,
        out,
        width,
        hidden,
        *sizes,
        tokens,
        **tile,
        **form,
        **options,
    )
    return out
