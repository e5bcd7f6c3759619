"""The product of 17 to 64 rows: weights are the left operand, and every program has an equal share of the work.

Three things keep memory busy. Weights are the left operand: sixty-four of their rows at a time are multiplied
straight from shared memory, whither the copy engine brings them. Blocks of weights are tall, since each reads all of
x again. And every program works an equal share, even where a share ends in the middle of a block (as in stream-K,
Osama et al., arXiv:2301.03598): then the program that arrives last adds the others' sums and finishes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_infer_engine.kernels.gemm.gemm_config import SmallMConfig
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import COUNTERS, Workspace


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
def _even_shares_linear(
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


def launch_stream_k_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int, int],
    norm: tuple[int, float],
    config: SmallMConfig,
    options: dict[str, Any],
    workspace: Workspace,
) -> None:
    """Launch it for small_m_linear, from which it takes the kernel's tensors after `weight` and options as they are.

    x [rows, width]; sizes: rows, columns, width; norm: parts of the sums of squares, epsilon.
    """
    _, columns, width = sizes
    blocks, steps = cdiv(columns, config.block_n), cdiv(width, config.block_k)
    share = cdiv(blocks * steps, config.programs) if config.programs else steps
    programs, split = cdiv(blocks * steps, share), share % steps != 0
    assert not split or blocks <= COUNTERS
    tile_floats = options["BLOCK_M"] * config.block_n * (2 if options["GATED"] else 1)
    described = _describable(x) and _describable(weight)
    _even_shares_linear[(programs,)](
        _described(x, options["BLOCK_M"], config.block_k) if described else x,
        _described(weight, config.block_n, config.block_k) if described else weight,
        *ends,
        workspace.partials(2 * programs * tile_floats if split else 0),
        workspace.counters,
        *sizes,
        x.stride(0),
        share,
        *norm,
        DESCRIBED=described,
        SPLIT=split,
        **options,
    )


def _describable(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read it: rows start at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0


def _described(matrix: torch.Tensor, block_rows: int, block_k: int) -> Any:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_k])
