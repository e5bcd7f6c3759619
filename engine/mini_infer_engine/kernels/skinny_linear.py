"""Matrix products of at most sixty-four rows, where reading the weights once is all the time there is.

The bias, the gated activation and the residual sum ride along in the same kernel. A norm in front does not: its sums
break the pipeline of loads (7B qkv on an H200: 28 us fused, 11 us plain).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

MAX_ROWS = 64


@triton.jit(do_not_specialize=["rows"])
def _skinny_linear(
    x,
    weight,
    bias,
    residual,
    out,
    partials,
    counters,
    rows,
    columns,
    width,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (column block, split of the width). The split that arrives last adds the others' sums and finishes."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    n_inside = n < columns
    m_inside = m < rows
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    weight_rows = weight + n.to(tl.int64)[:, None] * width
    up_rows = weight_rows + columns.to(tl.int64) * width
    width_of_split = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLIT_K) * BLOCK_K
    first = split * width_of_split
    for start in range(first, tl.minimum(first + width_of_split, width), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_inside = k < width
        x_mask = m_inside[:, None] if EVEN_K else m_inside[:, None] & k_inside[None, :]
        values = tl.load(x + m[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:
            tile = tl.load(weight_rows + k[None, :])
        else:
            tile = tl.load(weight_rows + k[None, :], mask=n_inside[:, None] & k_inside[None, :], other=0.0)
        total = tl.dot(values, tl.trans(tile), total, input_precision=PRECISION)
        if GATED:
            if EVEN_K and EVEN_N:
                tile = tl.load(up_rows + k[None, :])
            else:
                tile = tl.load(up_rows + k[None, :], mask=n_inside[:, None] & k_inside[None, :], other=0.0)
            total_up = tl.dot(values, tl.trans(tile), total_up, input_precision=PRECISION)

    last = True
    if SPLIT_K > 1:
        tile_of = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partials + (block * SPLIT_K + split) * BLOCK_M * BLOCK_N
        tl.store(mine + tile_of, total)
        tl.debug_barrier()
        last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for other in range(SPLIT_K):  # in the same order whoever is last, so that results repeat bit for bit
                theirs = partials + (block * SPLIT_K + other) * BLOCK_M * BLOCK_N
                total += tl.load(theirs + tile_of, cache_modifier=".cg")
            tl.store(counters + block, 0)
    if last:
        if BIAS:
            total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        out_mask = m_inside[:, None] & n_inside[None, :]
        if RESIDUAL:
            total += tl.load(residual + m[:, None] * columns + n[None, :], mask=out_mask, other=0.0).to(tl.float32)
        tl.store(out + m[:, None] * columns + n[None, :], total.to(out.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How one shape is cut; the stored ones were measured by benchmarks/kernels.py."""

    block_n: int
    block_k: int
    split_k: int
    warps: int
    stages: int


def row_block_of(rows: int) -> int:
    """Rows of the tile that computes `rows` of them: 16, 32 or 64."""
    return max(16, triton.next_power_of_2(rows))


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SkinnyConfig,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """X @ weight.T [+ bias] [gated] [+ residual] for x [rows <= MAX_ROWS, width], weight [columns, width].

    gated: weight is [2 * columns, width], gate first, and the result silu(gate) * up [rows, columns].
    A gate needs split_k == 1: its sums do not split.
    """
    rows, width = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks = triton.cdiv(columns, config.block_n)
    row_block = row_block_of(rows)
    workspace = Workspace.of(x.device, partials=blocks * config.split_k * row_block * config.block_n)
    assert config.split_k == 1 or (not gated and blocks <= COUNTERS)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows:
        _skinny_linear[(blocks, config.split_k)](
            x,
            weight,
            bias,
            residual,
            out,
            workspace.partials,
            workspace.counters,
            rows,
            columns,
            width,
            x.stride(0),
            BLOCK_M=row_block,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            SPLIT_K=config.split_k,
            EVEN_N=columns % config.block_n == 0,
            EVEN_K=width % config.block_k == 0,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            GATED=gated,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return out
