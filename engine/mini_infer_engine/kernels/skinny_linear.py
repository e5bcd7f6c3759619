"""Matrix products of few rows, where reading the weights once is all the time there is.

Bias, gated activation, residual sum and RMS norm ride along in the same kernel. The norm is split in two: who
writes the residual stream also writes it times the norm's weights, and its sums of squares; the product that reads
those scales its result. (Summing in the reading product breaks the pipeline of loads: 7B qkv on an H200, 28 us
against 11.)

Three things keep memory busy. Weights are the left operand: sixty-four of their rows at a time are multiplied
straight from shared memory, whither the copy engine brings them. Blocks of weights are tall, since each reads all of
x again. And every program works an equal share, even where a share ends in the middle of a block (as in stream-K,
Osama et al., arXiv:2301.03598): then the program that arrives last adds the others' sums and finishes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_infer_engine.kernels.workspace import COUNTERS, Workspace

MAX_ROWS = 128


@triton.jit
def _tile(
    matrix,
    first_row,
    first_k,
    rows,
    width,
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """[BLOCK_R, BLOCK_K] of a matrix, zeros beyond its edges: by the copy engine where `matrix` is a descriptor."""
    if DESCRIBED:
        tile = matrix.load([first_row, first_k])
    else:
        row = first_row + tl.arange(0, BLOCK_R)
        k = first_k + tl.arange(0, BLOCK_K)
        places = matrix + row.to(tl.int64)[:, None] * stride + k[None, :]
        tile = tl.load(places, mask=(row < rows)[:, None] & (k < width)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["rows", "share", "parts"])
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
    share,
    parts,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    NEXT_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program's share of the steps along the width, counted through all blocks of columns one after another."""
    steps = tl.cdiv(width, BLOCK_K)
    step = tl.program_id(0) * share
    stop = tl.minimum(step + share, tl.cdiv(columns, BLOCK_N) * steps)
    weight_rows = columns * 2 if GATED else columns
    m = tl.arange(0, BLOCK_M)
    m_inside = m < rows
    # What the end needs is asked for before the long wait for weights, where it fits the registers.
    early: tl.constexpr = BLOCK_M <= 32
    while step < stop:
        block = step // steps
        begin = block * steps
        end = tl.minimum(stop, begin + steps)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        total_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        n_inside = n < columns
        out_mask = n_inside[:, None] & m_inside[None, :]
        places = m[None, :] * columns + n[:, None]
        if PARTS > 0:
            part = tl.arange(0, PARTS)
            squares_at = square_sums + part[:, None] * BLOCK_M + m[None, :]
            if early:  # the second condition, always true, keeps the compiler from summing before the loads of weights
                squares = tl.load(squares_at, mask=(part < parts)[:, None] & (step < stop), other=0.0)
        if RESIDUAL and early:
            before = tl.load(residual + places, mask=out_mask, other=0.0)
        for k in range((step - begin) * BLOCK_K, (end - begin) * BLOCK_K, BLOCK_K):
            values = tl.trans(_tile(x, 0, k, rows, width, x_stride, BLOCK_M, BLOCK_K, DESCRIBED))
            tile = _tile(weight, block * BLOCK_N, k, weight_rows, width, width, BLOCK_N, BLOCK_K, DESCRIBED)
            total = tl.dot(tile, values, total, input_precision=PRECISION)
            if GATED:
                up_row = columns + block * BLOCK_N
                tile = _tile(weight, up_row, k, weight_rows, width, width, BLOCK_N, BLOCK_K, DESCRIBED)
                total_up = tl.dot(tile, values, total_up, input_precision=PRECISION)

        whole = step < stop  # a tensor that is true
        if SPLIT:
            first_program = begin // share
            others = (begin + steps - 1) // share - first_program
            if others > 0:
                tile_of = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
                sums = partials + (2 if GATED else 1) * BLOCK_M * BLOCK_N * _slot(tl.program_id(0), begin, share)
                tl.store(sums + tile_of, total)
                if GATED:
                    tl.store(sums + BLOCK_M * BLOCK_N + tile_of, total_up)
                tl.debug_barrier()
                whole = tl.atomic_add(counters + block, 1, sem="acq_rel") == others
                if whole:
                    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                    total_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                    # In the same order whoever is last, so that results repeat bit for bit.
                    for program in range(first_program, first_program + others + 1):
                        sums = partials + (2 if GATED else 1) * BLOCK_M * BLOCK_N * _slot(program, begin, share)
                        total += tl.load(sums + tile_of, cache_modifier=".cg")
                        if GATED:
                            total_up += tl.load(sums + BLOCK_M * BLOCK_N + tile_of, cache_modifier=".cg")
                    tl.store(counters + block, 0)
        if whole:
            if PARTS > 0:
                if not early:
                    squares = tl.load(squares_at, mask=(part < parts)[:, None], other=0.0)
                scale = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)[None, :]
                total = total * scale
                total_up = total_up * scale
            if BIAS:
                total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
            if GATED:
                total = total * tl.sigmoid(total) * total_up
            if RESIDUAL:
                if not early:
                    before = tl.load(residual + places, mask=out_mask, other=0.0)
                total += before.to(tl.float32)
            result = total.to(out.dtype.element_ty)
            tl.store(out + places, result, mask=out_mask)
            if NEXT_NORM:
                rounded = tl.where(out_mask, result.to(tl.float32), 0.0)
                norms = tl.load(next_norm + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
                tl.store(scaled + places, (rounded * norms).to(result.dtype), mask=out_mask)
                tl.store(next_square_sums + block * BLOCK_M + m, tl.sum(rounded * rounded, axis=0))
        step = begin + steps


@triton.jit
def _slot(program, begin, share):
    """Where a program leaves its sums of the block whose steps start at `begin`: it may have begun the one before."""
    return 2 * program + (program * share < begin).to(tl.int32)


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How one shape is cut; the stored ones were measured by benchmarks/gpu_kernels.py."""

    block_n: int
    block_k: int
    programs: int
    """At most so many programs share the work equally; 0: one for each block of columns."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """Rows that still lack their division by the root mean square."""

    values: torch.Tensor  # [rows, width], times the norm's weights
    square_sums: torch.Tensor  # [parts, row block] fp32, sums of squares of the rows before the weights
    eps: float


def row_block_of(rows: int) -> int:
    """Rows of the tile that computes `rows` of them: 16, 32, 64 or 128."""
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
    row_block = row_block_of(rows)
    blocks, steps = triton.cdiv(columns, config.block_n), triton.cdiv(width, config.block_k)
    share = triton.cdiv(blocks * steps, config.programs) if config.programs else steps
    programs = triton.cdiv(blocks * steps, share)
    split = share % steps != 0
    assert not split or blocks <= COUNTERS
    sums_of_block = row_block * config.block_n * (2 if gated else 1)
    workspace = Workspace.of(values.device, partials=2 * programs * sums_of_block if split else 0)
    out = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    scaled, sums = out, workspace.partials
    if next_norm is not None:
        scaled = torch.empty_like(out)
        sums = torch.empty((blocks, row_block), dtype=torch.float32, device=out.device)
    parts = 0 if square_sums is None else square_sums.shape[0]
    described = _describable(values) and _describable(weight)
    if rows:
        _skinny_linear[(programs,)](
            _described(values, row_block, config.block_k) if described else values,
            _described(weight, config.block_n, config.block_k) if described else weight,
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
            share,
            parts,
            eps,
            BLOCK_M=row_block,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            DESCRIBED=described,
            SPLIT=split,
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


def _describable(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read it: rows start at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0


def _described(matrix: torch.Tensor, block_rows: int, block_k: int) -> Any:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_k])
