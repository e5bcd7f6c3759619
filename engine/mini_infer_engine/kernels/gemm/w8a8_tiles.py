"""Assigns, reads and writes the tiles of products of rounded activations and rounded weights."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP_M = 8
"""Tiles of M whose programs are neighbours, so that the weights that they share stay in the L2 cache."""


@triton.jit
def tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the first row and the first column of this program's tile."""
    programs = GROUP_M * tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // programs * GROUP_M
    group = min(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    place = tl.program_id(0) % programs
    return (first + place % group) * BLOCK_M, place // group * BLOCK_N


@triton.jit
def store_tile(result, bias, out, out_stride, m, n, mask_m, mask_n):
    """Stores the fp32 tile of rows m and columns n in the result's dtype, plus the bias if there is one."""
    if bias is not None:
        result += tl.load(bias + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@functools.lru_cache(maxsize=4096)
def _cached_descriptor(address: int, dtype: torch.dtype, shape: tuple[int, int], rows: int, columns: int) -> Any:
    memory = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # a tensor would stay alive in the cache
    return TensorDescriptor(memory, list(shape), [shape[1], 1], [rows, columns])


def descriptor(values: torch.Tensor, rows: int, columns: int) -> Any:
    """Returns the tensor descriptor of a contiguous matrix of bytes, in tiles."""
    if values.is_cuda:
        return _cached_descriptor(values.data_ptr(), values.dtype, (values.shape[0], values.shape[1]), rows, columns)
    return TensorDescriptor.from_tensor(values, [rows, columns])
