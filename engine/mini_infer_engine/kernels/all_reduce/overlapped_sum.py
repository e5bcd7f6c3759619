"""All-reduce of many rows between two GPUs, overlapped with the GEMMs before and after it.

The product that makes the summands is computed for one half of its rows, then for the other. As soon as a half is
computed, a copy engine, which takes no SMs, writes it into the peer's memory; after it, in the order of the same
stream, it writes the number of this sum into the peer's flag for that half. The kernel below waits for the flag of one
half, adds both ranks' summands to the residual stream and stores its RMSNorm; then the next product computes that half,
while the other one is still being copied. (PyTorch's asynchronous tensor parallelism and Flux, arXiv:2406.06858,
decompose products in the same way.) Two numbers have the same sum in either order, so that both ranks compute the same
bits.

Received data is stored in the two buffers that alternate in `one_shot`. It may be written there without a handshake. A
rank copies its part of exchange n when its own kernels of exchange n - 1 have ended. Those have waited for something
that the peer does only after its kernels of exchange n - 2: its signal in `one_shot`, its data in `pushed_sum`, or the
flag of the second half, whose product it computes after them. So the peer has read the earlier content of the buffer of
n, which was last used in n - 2 or before. The buffer cannot be in use for a later exchange either, because the peer
cannot get beyond n without this rank. Likewise a rank may write its own summand of a one-shot exchange n where it
received something in n - 2: it has waited for both flags of that, so that nothing more arrives. Hence the one rule:
both halves of a sum that has begun are added before the next exchange.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.all_reduce.one_shot import POLLS, block_options, is_released, store_row
from mini_infer_engine.kernels.sizes import cdiv

_TILE_ROWS, _TILE_COLUMNS = 256, 128
"""The tile of cuBLAS's products on Hopper; with tiles of 128 x 256 their number would be equal."""
_SM_COUNT = 132
"""The number of SMs of an H100 or H200. On other GPUs the halves are correct too, and must be equal on both ranks."""
FLAGS = 2
"""The number of flags, one for each half."""
FLAG_BYTES = 16
"""Bytes between two flags, so that the kernel is compiled for a single alignment: a flag takes four of them."""

_FAR = tl.constexpr(1 << 30)
"""The distance by which a flag is advanced once waiting is over: kernels launched later then need not check."""


def halves(rows: int, width: int) -> tuple[slice, slice]:
    """Splits rows into two parts, about halves, of at least two tiles of rows.

    The cut minimises the waves of tiles of the two products of this width, because a partial wave costs as much as a
    full one (wave quantization). Of several such cuts it is the one nearest to the middle, and the first part is the
    smaller one: its copy has only the second part's product to hide behind.
    """
    tiles = cdiv(rows, _TILE_ROWS)
    least = max(1, tiles * 3 // 8)

    def cost(first: int) -> tuple[int, int, int]:
        waves = sum(cdiv(part * cdiv(width, _TILE_COLUMNS), _SM_COUNT) for part in (first, tiles - first))
        return waves, abs(tiles - 2 * first), first

    end = min(range(least, tiles - least + 1), key=cost) * _TILE_ROWS
    return slice(0, end), slice(end, rows)


@triton.jit(do_not_specialize=["number"])
def _add_received(
    summand,
    received,
    flag,
    number,
    released,
    residual,
    weight,
    out,
    width,
    eps,
    BLOCK: tl.constexpr,
):
    """Adds received rows, one program per row. Numbers of sums wrap around, hence the difference."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    at = tl.program_id(0).to(tl.int64) * width + offsets
    weights = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(summand + at, mask=mask, other=0.0).to(tl.float32)
    behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number
    polls = 0
    while behind < 0:
        behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number
        polls += 1
        if polls % POLLS == 0:
            is_over = is_released(released)
            tl.store(flag, number + _FAR, mask=is_over)
            behind = tl.where(is_over, 0, behind)
    tl.debug_barrier()
    total += tl.load(received + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    store_row(total, values, residual, weights, out, at, mask, width, eps, True)


def launch_add_received(
    summand: torch.Tensor,
    received: torch.Tensor,
    flag: torch.Tensor,
    number: int,
    released: torch.Tensor,
    *,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Adds half of this rank's and the peer's summand to the residual [rows, width] in place; out is its RMSNorm.

    All are dense. `received` [rows, width] is complete once the first int32 of `flag` is `number`, modulo 2^32.
    `one_shot.Peers` documents `released`.
    """
    rows, width = residual.shape
    number = (number + 2**31) % 2**32 - 2**31
    _add_received[(rows,)](
        summand, received, flag, number, released, residual, weight, out, width, eps, **block_options(width)
    )
