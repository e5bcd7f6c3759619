"""One-shot all-reduce over peer memory, fused with residual sum and RMSNorm, and the gather of logits.

Each GPU reads all GPUs' summands and adds them up for itself, in the order of ranks: one exchange of signals, no second
step (as in TensorRT-LLM's and vLLM's custom all-reduce). Programs with the same number synchronise first: each writes a
counter to every peer's signal pad and waits for theirs. These kernels write nothing but counters to a peer.
`overlapped_sum` writes data into the same buffers, and explains why that is safe. After this barrier, all peers have
written their summands, and have ended every earlier kernel. Memory that was read two exchanges ago may therefore be
written again: producers of summands alternate between two buffers.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

MAX_PROGRAMS = 1024
"""The largest number of programs in one kernel: each has counters of its own."""
_GATHER_BLOCK = 4096
POLLS = tl.constexpr(1 << 14)
"""Polls between two checks whether waiting is over (`is_released`), some 15 ms.

A check by all programs takes up to 3 ms, for which a peer waits: with fewer polls, each check would cause the next.
"""


class Peers(NamedTuple):
    """The pointers and counters that a rank's kernels need."""

    buffers: torch.Tensor  # [ranks] int64: pointers to all ranks' buffers
    pads: torch.Tensor  # [ranks] int64: to their signal pads
    epochs: torch.Tensor  # [MAX_PROGRAMS] int32: how often this rank's programs have met
    released: torch.Tensor  # [1] int32 in pinned main memory: not 0 once nobody is to wait any more


@triton.jit
def is_released(released):
    """True if no kernel is to wait any longer; equal in all threads, because each reads it.

    The flag is in main memory, so that the host sets it without the driver, which may itself wait for kernels. Reading
    it takes microseconds, and many programs read it one after the other: poll it only after TURNS.
    """
    return tl.max(tl.load(released + tl.zeros((256,), tl.int32), volatile=True), axis=0) != 0


@triton.jit
def _meet(pads, epochs, released, program, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Waits until the programs with this number have arrived on all ranks. `pads` [WORLD] int64 are pointers to all
    pads.

    A pad is [programs, WORLD] int32: the last counter of each rank. Counters wrap around, hence the difference.
    """
    peers = tl.arange(0, WORLD)
    epoch = tl.load(epochs + program) + 1
    theirs = pads.to(tl.pointer_type(tl.int32)) + program * WORLD + RANK
    tl.atomic_xchg(theirs, tl.zeros((WORLD,), tl.int32) + epoch, sem="release", scope="sys")
    own = of_rank(pads, RANK, WORLD).to(tl.pointer_type(tl.int32)) + program * WORLD + peers
    nothing = tl.zeros((WORLD,), tl.int32)
    behind = tl.min(tl.atomic_add(own, nothing, sem="acquire", scope="sys") - epoch, axis=0)
    polls = 0
    while behind < 0:
        behind = tl.min(tl.atomic_add(own, nothing, sem="acquire", scope="sys") - epoch, axis=0)
        polls += 1
        if polls % POLLS == 0:
            behind = tl.where(is_released(released), 0, behind)
    tl.debug_barrier()
    tl.store(epochs + program, epoch)


@triton.jit
def of_rank(pointers, rank, WORLD: tl.constexpr):
    """Returns one of the pointers [WORLD] int64."""
    return tl.sum(tl.where(tl.arange(0, WORLD) == rank, pointers, 0), axis=0)


@triton.jit
def _sum_of_ranks(places, offset, at, mask, out, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the sum of all ranks' summands [BLOCK] in fp32."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(WORLD):
        base = of_rank(places, peer, WORLD).to(tl.pointer_type(out.dtype.element_ty))
        base = tl.multiple_of(base + offset, 16)
        total += tl.load(base + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def store_row(total, values, residual, weights, out, at, mask, width, eps, NORM: tl.constexpr):
    """Stores one row of a sum.

    NORM: adds the total to the residual, of which `values` is the earlier content, and stores its norm in out.
    Otherwise stores the total in out.
    """
    if NORM:
        rounded = (values + total).to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=mask)
        summed = rounded.to(tl.float32)
        total = summed * tl.rsqrt(tl.sum(summed * summed, axis=0) / width + eps) * weights
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _reduce(
    buffers,
    signals,
    epochs,
    released,
    offset,
    residual,
    weight,
    out,
    rows,
    width,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    NORM: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the ranks' rows: one program per row, or, if SHARED, per row modulo the number of programs.

    NORM: the sum is added to the residual, whose norm goes to out. Otherwise out is the sum.
    """
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    at = program.to(tl.int64) * width + offsets
    # What no kernel writes is read before the wait for the kernel before.
    places = tl.load(buffers + tl.arange(0, WORLD))
    pads = tl.load(signals + tl.arange(0, WORLD))
    weights = mask.to(tl.float32)
    if NORM:
        weights = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if SHARED:
        _meet(pads, epochs, released, program, RANK, WORLD)
        programs = tl.num_programs(0)
        for turn in range(tl.cdiv(rows - program, programs)):
            at = (program.to(tl.int64) + turn * programs) * width + offsets
            values = weights
            if NORM:
                values = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
            total = _sum_of_ranks(places, offset, at, mask, out, WORLD, BLOCK)
            store_row(total, values, residual, weights, out, at, mask, width, eps, NORM)
    else:
        values = weights
        if NORM:
            values = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        _meet(pads, epochs, released, program, RANK, WORLD)
        total = _sum_of_ranks(places, offset, at, mask, out, WORLD, BLOCK)
        store_row(total, values, residual, weights, out, at, mask, width, eps, NORM)


@triton.jit(do_not_specialize=["rows"])
def _gather(
    buffers,
    signals,
    epochs,
    released,
    offset,
    out,
    rows,
    columns,
    width,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gathers all ranks' columns. Programs share the blocks of all rows, with the same columns of all ranks."""
    program = tl.program_id(0)
    places = tl.load(buffers + tl.arange(0, WORLD))
    pads = tl.load(signals + tl.arange(0, WORLD))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _meet(pads, epochs, released, program, RANK, WORLD)
    blocks = tl.cdiv(columns, BLOCK)
    for tile in range(program, rows * blocks, tl.num_programs(0)):
        row = (tile // blocks).to(tl.int64)
        local = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        for peer in tl.static_range(WORLD):
            base = of_rank(places, peer, WORLD).to(tl.pointer_type(out.dtype.element_ty))
            base = tl.multiple_of(base + offset, 16)
            at = peer * columns + local
            mask = (local < columns) & (at < width)
            values = tl.load(base + row * columns + local, mask=mask, cache_modifier=".cg")
            tl.store(out + row * width + at, values, mask=mask)


def block_options(width: int) -> dict[str, Any]:
    """Returns constants and launch options of kernels whose programs compute one row at a time."""
    block = next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    return {"BLOCK": block, "num_warps": min(warps, max(1, block // 32))}  # no thread has another's elements, too


def row_options(width: int, *, rank: int, world: int, norm: bool, pdl: bool) -> dict[str, Any]:
    """Returns constants and launch options of such kernels that also synchronise the ranks."""
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    return options | block_options(width) | {"RANK": rank, "WORLD": world, "NORM": norm, "PDL": pdl}


def launch_reduce(
    peers: Peers,
    offset: int,
    out: torch.Tensor,
    *,
    rank: int,
    world: int,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> torch.Tensor:
    """Sums all ranks' summands, which are `offset` elements of out's dtype after the start of their buffers.

    out [rows, width] becomes the sum. With a residual [rows, width], the sum is added to it in place, and out becomes
    its RMSNorm by `weight`.
    """
    rows, width = out.shape
    _reduce[(min(rows, MAX_PROGRAMS),)](
        *peers,
        offset,
        out if residual is None else residual,
        out if weight is None else weight,
        out,
        rows,
        width,
        eps,
        SHARED=rows > MAX_PROGRAMS,
        **row_options(width, rank=rank, world=world, norm=residual is not None, pdl=pdl),
    )
    return out


def launch_gather(
    peers: Peers,
    offset: int,
    out: torch.Tensor,
    columns: int,
    *,
    rank: int,
    world: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Gathers the first `width` columns of all ranks' [rows, columns] side by side, in out [rows, width], dense.

    The ranks' columns are `offset` elements of out's dtype after the start of their buffers.
    """
    rows, width = out.shape
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    _gather[(min(rows * cdiv(columns, _GATHER_BLOCK), MAX_PROGRAMS),)](
        *peers,
        offset,
        out,
        rows,
        columns,
        width,
        RANK=rank,
        WORLD=world,
        PDL=pdl,
        BLOCK=_GATHER_BLOCK,
        num_warps=8,
        **options,
    )
    return out
