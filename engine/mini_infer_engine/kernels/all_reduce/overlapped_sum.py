"""All-reduce of many rows between two GPUs, overlapped with the GEMMs before and after it.

The product that makes the summands is computed for one half of its rows, then for the other. As soon as a half is made,
a copy engine writes it into the peer's memory, which takes no SMs, and behind it, in the order of the same stream, the
number of this sum into the peer's flag for that half. The kernel below waits for the flag of one half, adds both ranks'
summands to the residual stream and stores its RMSNorm; then the next product computes that half, while the other one is
still being copied. (PyTorch's asynchronous tensor parallelism and Flux, arXiv:2406.06858, decompose products in the
same way.) Two numbers have the same sum in either order, so that both ranks compute the same bits.

What a rank receives comes to stand in the two buffers that take turns in `one_shot`. It may be written there without
asking. A rank copies its part of exchange n when its own kernels of exchange n - 1 have ended. Those have waited for
something that the peer does only after its kernels of exchange n - 2: its signal in `one_shot`, its data in
`pushed_sum`, or the flag of the second half, whose product it computes after them. So the peer has read whatever stood
in the buffer of n, which was last used in n - 2 or before. It cannot be used already for a later exchange either, for
the peer cannot get beyond n without this rank. Likewise a rank may write its own summand of a one-shot exchange n where
it received something in n - 2: it has waited for both flags of that, so nothing more comes. Hence the one rule: both
halves of a sum that has begun are added before the next exchange.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.all_reduce.one_shot import TURNS, block_options, is_released, store_row
from mini_infer_engine.kernels.sizes import cdiv

_TILE_ROWS, _TILE_COLUMNS = 256, 128
"""Of cuBLAS's products on Hopper, which has the same number of tiles of 128 x 256."""
_SM_COUNT = 132
"""Of an H100 or H200. Elsewhere halves are as right, and must be the same on both ranks."""
FLAGS = 2
"""One for each half."""
FLAG_BYTES = 16
"""Apart, so that the kernel is compiled for one alignment: a flag has four of them."""

_FAR = tl.constexpr(1 << 30)
"""How far a flag is set ahead once nobody is to wait any more: what is launched after that need not look."""


def halves(rows: int, width: int) -> tuple[slice, slice]:
    """Both parts, halves about, of at least two tiles of rows.

    They are cut where the two products of this width take the fewest waves of tiles, for a partial wave costs as much
    as a full one (wave quantization). Where several cuts do, it is near the middle, and the first part is the smaller
    one: its copy has only the second part's product to hide behind.
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
    """Program (row). Numbers of sums wrap around, hence the difference."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    at = tl.program_id(0).to(tl.int64) * width + offsets
    weights = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(summand + at, mask=mask, other=0.0).to(tl.float32)
    behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number
    turns = 0
    while behind < 0:
        behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number
        turns += 1
        if turns % TURNS == 0:
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
    """Add a half of this rank's summand and of the peer's to the residual [rows, width] in place; out is its RMSNorm.

    All are dense. `received` [rows, width] is there once the first int32 of `flag` is `number`, modulo 2^32.
    `released`: see `one_shot.Peers`.
    """
    rows, width = residual.shape
    number = (number + 2**31) % 2**32 - 2**31
    _add_received[(rows,)](
        summand, received, flag, number, released, residual, weight, out, width, eps, **block_options(width)
    )
