"""Stream-K GEMM (Osama et al., arXiv:2301.03598) for M of 17 to 64, with weights as the left operand.

Three things keep memory busy. Weights are the left operand: tensor cores multiply 64 of their rows at a time straight
from shared memory, into which TMA copies them. Tiles of weights are tall, because each reads all of x again. And every
program has an equal number of steps along K, counted through all output tiles, even if it ends within a tile: then the
program that arrives last at the tile adds all partial sums and runs the epilogue.
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
def _load_tile(
    matrix,
    first_row,
    first_k,
    rows,
    K,
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Loads [BLOCK_R, BLOCK_K] of a matrix, zeros beyond its edges: by TMA if `matrix` is a tensor descriptor."""
    if TMA:
        tile = matrix.load([first_row, first_k])
    else:
        offs_r = first_row + tl.arange(0, BLOCK_R)
        offs_k = first_k + tl.arange(0, BLOCK_K)
        pointers = matrix + offs_r.to(tl.int64)[:, None] * stride + offs_k[None, :]
        tile = tl.load(pointers, mask=(offs_r < rows)[:, None] & (offs_k < K)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["M", "steps_per_program", "parts"])
def _stream_k_gemm(
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
    M,
    N,
    K,
    x_stride,
    steps_per_program,
    parts,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    NEXT_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stream-K: a program computes a range of steps along K, which are counted through all tiles of N in turn."""
    steps_per_tile = tl.cdiv(K, BLOCK_K)
    step = tl.program_id(0) * steps_per_program
    stop = tl.minimum(step + steps_per_program, tl.cdiv(N, BLOCK_N) * steps_per_tile)
    weight_rows = N * 2 if GATED else N
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    # Operands of the epilogue are loaded before the long wait for weights, where they fit the registers.
    load_early: tl.constexpr = BLOCK_M <= 32
    while step < stop:
        tile_n = step // steps_per_tile
        tile_begin = tile_n * steps_per_tile
        tile_end = tl.minimum(stop, tile_begin + steps_per_tile)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        acc_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        mask_n = offs_n < N
        out_mask = mask_n[:, None] & mask_m[None, :]
        out_offsets = offs_m[None, :] * N + offs_n[:, None]
        if PARTS > 0:
            part = tl.arange(0, PARTS)
            squares_at = square_sums + part[:, None] * BLOCK_M + offs_m[None, :]
            if (
                load_early
            ):  # the second condition, always true, keeps the compiler from reducing before the loads of weights
                squares = tl.load(squares_at, mask=(part < parts)[:, None] & (step < stop), other=0.0)
        if RESIDUAL and load_early:
            residual_values = tl.load(residual + out_offsets, mask=out_mask, other=0.0)
        for start_k in range((step - tile_begin) * BLOCK_K, (tile_end - tile_begin) * BLOCK_K, BLOCK_K):
            x_tile = tl.trans(_load_tile(x, 0, start_k, M, K, x_stride, BLOCK_M, BLOCK_K, TMA))
            weight_tile = _load_tile(weight, tile_n * BLOCK_N, start_k, weight_rows, K, K, BLOCK_N, BLOCK_K, TMA)
            acc = tl.dot(weight_tile, x_tile, acc, input_precision=PRECISION)
            if GATED:
                up_row = N + tile_n * BLOCK_N
                weight_tile = _load_tile(weight, up_row, start_k, weight_rows, K, K, BLOCK_N, BLOCK_K, TMA)
                acc_up = tl.dot(weight_tile, x_tile, acc_up, input_precision=PRECISION)

        is_last = step < stop  # a tensor that is true
        if SPLIT:
            first_program = tile_begin // steps_per_program
            other_programs = (tile_begin + steps_per_tile - 1) // steps_per_program - first_program
            if other_programs > 0:
                partial_offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + offs_m[None, :]
                tile_partials = partials + (2 if GATED else 1) * BLOCK_M * BLOCK_N * _partials_slot(
                    tl.program_id(0), tile_begin, steps_per_program
                )
                tl.store(tile_partials + partial_offsets, acc)
                if GATED:
                    tl.store(tile_partials + BLOCK_M * BLOCK_N + partial_offsets, acc_up)
                tl.debug_barrier()
                is_last = tl.atomic_add(counters + tile_n, 1, sem="acq_rel") == other_programs
                if is_last:
                    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                    acc_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                    # In a fixed order, whichever program is last, so that results repeat bit for bit.
                    for program in range(first_program, first_program + other_programs + 1):
                        tile_partials = partials + (2 if GATED else 1) * BLOCK_M * BLOCK_N * _partials_slot(
                            program, tile_begin, steps_per_program
                        )
                        acc += tl.load(tile_partials + partial_offsets, cache_modifier=".cg")
                        if GATED:
                            acc_up += tl.load(tile_partials + BLOCK_M * BLOCK_N + partial_offsets, cache_modifier=".cg")
                    tl.store(counters + tile_n, 0)
        if is_last:
            if PARTS > 0:
                if not load_early:
                    squares = tl.load(squares_at, mask=(part < parts)[:, None], other=0.0)
                scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[None, :]
                acc = acc * scale
                acc_up = acc_up * scale
            if BIAS:
                acc += tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                acc = acc * tl.sigmoid(acc) * acc_up
            if RESIDUAL:
                if not load_early:
                    residual_values = tl.load(residual + out_offsets, mask=out_mask, other=0.0)
                acc += residual_values.to(tl.float32)
            result = acc.to(out.dtype.element_ty)
            tl.store(out + out_offsets, result, mask=out_mask)
            if NEXT_NORM:
                rounded = tl.where(out_mask, result.to(tl.float32), 0.0)
                norms = tl.load(next_norm + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
                tl.store(scaled + out_offsets, (rounded * norms).to(result.dtype), mask=out_mask)
                tl.store(next_square_sums + tile_n * BLOCK_M + offs_m, tl.sum(rounded * rounded, axis=0))
        step = tile_begin + steps_per_tile


@triton.jit
def _partials_slot(program, tile_begin, steps_per_program):
    """Returns the place of a program's partial sums of the tile whose steps start at `tile_begin`.

    A program has two places, for its first tile and its second.
    """
    return 2 * program + (program * steps_per_program < tile_begin).to(tl.int32)


def launch_stream_k_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epilogue: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, int, int],
    norm: tuple[int, float],
    config: SmallMConfig,
    options: dict[str, Any],
    workspace: Workspace,
) -> None:
    """Launches the kernel for `gemm_dispatch`, and passes its epilogue tensors and options on unchanged.

    x [M, K]; sizes: M, N, K; norm: parts of the deferred norm's sums of squares, epsilon.
    """
    _, n, k = sizes
    tiles, steps_per_tile = cdiv(n, config.block_n), cdiv(k, config.block_k)
    steps_per_program = cdiv(tiles * steps_per_tile, config.programs) if config.programs else steps_per_tile
    programs, split = cdiv(tiles * steps_per_tile, steps_per_program), steps_per_program % steps_per_tile != 0
    assert not split or tiles <= COUNTERS
    tile_floats = options["BLOCK_M"] * config.block_n * (2 if options["GATED"] else 1)
    tma = _supports_tma(x) and _supports_tma(weight)
    _stream_k_gemm[(programs,)](
        _descriptor(x, options["BLOCK_M"], config.block_k) if tma else x,
        _descriptor(weight, config.block_n, config.block_k) if tma else weight,
        *epilogue,
        workspace.partials(2 * programs * tile_floats if split else 0),
        workspace.counters,
        *sizes,
        x.stride(0),
        steps_per_program,
        *norm,
        TMA=tma,
        SPLIT=split,
        **options,
    )


def _supports_tma(matrix: torch.Tensor) -> bool:
    """True if TMA can read the matrix: rows start at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0


def _descriptor(matrix: torch.Tensor, block_rows: int, block_k: int) -> Any:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_k])
