"""Matrix products of at most sixty-four rows, where reading the weights once is all the time there is.

Bias, gated activation, residual sum and RMS norm ride along in the same kernel. The norm is split in two: who
writes the residual stream also writes it times the norm's weights, and its sums of squares; the product that reads
those scales its result. (Summing in the reading product breaks the pipeline of loads: 7B qkv on an H200, 28 us
against 11.)
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
    square_sums,
    next_norm,
    out,
    scaled,
    next_square_sums,
    partials,
    counters,
    rows,
    columns,
    width,
    x_stride,
    parts,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    NEXT_NORM: tl.constexpr,
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
        if PARTS > 0:
            part = tl.arange(0, PARTS)
            sums = tl.load(square_sums + part[:, None] * BLOCK_M + m[None, :], mask=(part < parts)[:, None], other=0.0)
            scale = tl.rsqrt(tl.sum(sums, axis=0) / width + eps)[:, None]
            total = total * scale
            total_up = total_up * scale
        if BIAS:
            total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        out_mask = m_inside[:, None] & n_inside[None, :]
        if RESIDUAL:
            total += tl.load(residual + m[:, None] * columns + n[None, :], mask=out_mask, other=0.0).to(tl.float32)
        result = total.to(out.dtype.element_ty)
        tl.store(out + m[:, None] * columns + n[None, :], result, mask=out_mask)
        if NEXT_NORM:
            rounded = tl.where(out_mask, result.to(tl.float32), 0.0)
            norms = tl.load(next_norm + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
            tl.store(scaled + m[:, None] * columns + n[None, :], (rounded * norms).to(result.dtype), mask=out_mask)
            tl.store(next_square_sums + block * BLOCK_M + m, tl.sum(rounded * rounded, axis=1))


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How one shape is cut; the stored ones were measured by benchmarks/gpu_kernels.py."""

    block_n: int
    block_k: int
    split_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """Rows that still lack their division by the root mean square."""

    values: torch.Tensor  # [rows, width], times the norm's weights
    square_sums: torch.Tensor  # [parts, row block] fp32, sums of squares of the rows before the weights
    eps: float


def row_block_of(rows: int) -> int:
    """Rows of the tile that computes `rows` of them: 16, 32 or 64."""
    return max(16, triton.next_power_of_2(rows))


def skinny_linear(
    x: torch.Tensor | HalfNormed,
    weight: torch.Tensor,
    config: SkinnyConfig,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """`x @ weight.T [+ bias] [gated] [+ residual]` for x [rows <= MAX_ROWS, width], weight [columns, width].

    gated: weight is [2 * columns, width], gate first, and the result silu(gate) * up [rows, columns].
    A gate needs split_k == 1: its sums do not split.
    """
    return _launch(x, weight, config, bias, residual, gated, None)[0]


def skinny_linear_then_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SkinnyConfig,
    *,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, HalfNormed]:
    """`residual + x @ weight.T [+ bias]`, and that half normed for the product that comes next."""
    out, scaled, sums = _launch(x, weight, config, bias, residual, False, norm_weight)
    return out, HalfNormed(scaled, sums, eps)


def _launch(
    x: torch.Tensor | HalfNormed,
    weight: torch.Tensor,
    config: SkinnyConfig,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    next_norm: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, square_sums, eps = (x.values, x.square_sums, x.eps) if isinstance(x, HalfNormed) else (x, None, 0.0)
    rows, width = values.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks = triton.cdiv(columns, config.block_n)
    row_block = row_block_of(rows)
    workspace = Workspace.of(values.device, partials=blocks * config.split_k * row_block * config.block_n)
    assert config.split_k == 1 or (not gated and blocks <= COUNTERS)
    out = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    scaled, sums = out, workspace.partials
    if next_norm is not None:
        scaled = torch.empty_like(out)
        sums = torch.empty((blocks, row_block), dtype=torch.float32, device=out.device)
    parts = 0 if square_sums is None else square_sums.shape[0]
    if rows:
        _skinny_linear[(blocks, config.split_k)](
            values,
            weight,
            bias,
            residual,
            square_sums,
            next_norm,
            out,
            scaled,
            sums,
            workspace.partials,
            workspace.counters,
            rows,
            columns,
            width,
            values.stride(0),
            parts,
            eps,
            BLOCK_M=row_block,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            SPLIT_K=config.split_k,
            EVEN_N=columns % config.block_n == 0,
            EVEN_K=width % config.block_k == 0,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            GATED=gated,
            PARTS=triton.next_power_of_2(parts) if parts else 0,
            NEXT_NORM=next_norm is not None,
            PRECISION="ieee" if values.dtype == torch.float32 else "tf32",
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return out, scaled, sums
