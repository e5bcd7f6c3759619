"""All-reduce of few rows: each GPU writes its summand into all others' memory, and waits for theirs in its own.

It takes one transfer over NVLink instead of a signal and a read (`one_shot`). A place that is still empty has a mark,
which no summand contains, so that the data is its own signal (as in the Lamport kernels of TensorRT-LLM, after NCCL's
LL protocol). A rank's own summand may be anywhere, and be the sum of several: of splits of K, or of experts. Every row
of a sum has a place for each rank's summand in an inbox of three slots, which rotate. In exchange e a program fills
slot e of its peers, marks its own slot e - 1, which it has read, as empty again, and waits for its slot e. The next
write of a peer into slot e - 1 is in exchange e + 2, after the peer has seen what this rank writes in e + 1: by then
this kernel is over.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mini_infer_engine.kernels.all_reduce.one_shot import POLLS, is_released, of_rank, row_options, store_row

MAX_ROWS = 256
"""The largest number of rows in one sum: each has places and a counter of its own."""
MAX_ROW_BYTES = 16 << 10
_SLOTS = 3
MARK = -0x7FFF8000
"""The mark of an empty place, in every four bytes: two negative zeros in 16 bits each, a denormal number in fp32."""


class Inbox(NamedTuple):
    """The pointers and counters that a rank's kernels need."""

    buffers: torch.Tensor  # [ranks] int64: pointers to all ranks' memory
    begin: int  # of the inbox, behind that of every rank's memory, bytes
    epochs: torch.Tensor  # [MAX_ROWS] int32: exchanges of each row so far
    released: torch.Tensor  # as in one_shot.Peers


def inbox_bytes(world: int) -> int:
    """Returns the size of one rank's inbox. Before its first use all ranks must set each four bytes to MARK."""
    return _SLOTS * world * MAX_ROWS * MAX_ROW_BYTES


@triton.jit
def _pushed_sum(
    buffers,
    epochs,
    released,
    inbox,
    summands,
    stride,
    residual,
    weight,
    out,
    width,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
    BITS: tl.constexpr,
    MARK: tl.constexpr,
    ROWS: tl.constexpr,
    PLACE: tl.constexpr,
    SLOTS: tl.constexpr,
    SUMMANDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums with one program per row. BITS: out's elements as integers, the unit of `inbox`; a row has PLACE of them.

    This rank's SUMMANDS are `stride` elements apart, and their sum is rounded. NORM: the sum over ranks is added to the
    residual, whose norm goes to out. Otherwise out is the sum.
    """
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    at = row.to(tl.int64) * width + offsets
    # What no kernel writes is read before the wait for the kernel before.
    places = tl.load(buffers + tl.arange(0, WORLD))
    weights = mask.to(tl.float32)
    if NORM:
        weights = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(epochs + row)
    own = of_rank(places, RANK, WORLD).to(tl.pointer_type(BITS))
    if SUMMANDS == 1:
        values = tl.load(summands + at, mask=mask, other=0.0)
    else:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for number in tl.static_range(SUMMANDS):
            total += tl.load(summands + number * stride + at, mask=mask, other=0.0).to(tl.float32)
        values = total.to(out.dtype.element_ty)
    summand = values.to(BITS, bitcast=True)
    summand = tl.where(summand == MARK, 0, summand)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            theirs = of_rank(places, peer, WORLD).to(tl.pointer_type(BITS)) + inbox
            theirs += ((epoch % SLOTS * WORLD + RANK) * ROWS + row) * PLACE
            tl.store(tl.multiple_of(theirs, 16) + offsets, summand, mask=mask)
    values = weights
    if NORM:
        values = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            read = own + inbox + (((epoch + SLOTS - 1) % SLOTS * WORLD + peer) * ROWS + row) * PLACE
            tl.store(tl.multiple_of(read, 16) + tl.arange(0, PLACE), tl.full((PLACE,), MARK, BITS))
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(WORLD):
        part = summand
        if peer != RANK:
            place = own + inbox + ((epoch % SLOTS * WORLD + peer) * ROWS + row) * PLACE
            place = tl.multiple_of(place, 16) + offsets
            part = tl.load(place, mask=mask, other=0, volatile=True)
            polls = 0
            while tl.max((part == MARK).to(tl.int32), axis=0) > 0:  # something of it has not come
                part = tl.load(place, mask=mask, other=0, volatile=True)
                polls += 1
                if polls % POLLS == 0:
                    part = tl.where(is_released(released), 0, part)
        total += part.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    store_row(total, values, residual, weights, out, at, mask, width, eps, NORM)
    tl.store(epochs + row, epoch + 1)


def launch_pushed_sum(
    inbox: Inbox,
    summands: torch.Tensor,
    out: torch.Tensor,
    *,
    rank: int,
    world: int,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> torch.Tensor:
    """Computes `one_shot.launch_reduce` for at most MAX_ROWS rows of MAX_ROW_BYTES each.

    summands: this rank's, [rows, width] or several [N, rows, width], dense, of out's dtype.
    """
    rows, width = out.shape
    size = out.element_size()
    _pushed_sum[(rows,)](
        inbox.buffers,
        inbox.epochs,
        inbox.released,
        inbox.begin // size,
        summands,
        rows * width,
        out if residual is None else residual,
        out if weight is None else weight,
        out,
        width,
        eps,
        BITS=tl.int16 if size == 2 else tl.int32,
        MARK=-0x8000 if size == 2 else MARK,
        ROWS=MAX_ROWS,
        PLACE=MAX_ROW_BYTES // size,
        SLOTS=_SLOTS,
        SUMMANDS=summands.shape[0] if summands.dim() == 3 else 1,
        **row_options(width, rank=rank, world=world, norm=residual is not None, pdl=pdl),
    )
    return out
