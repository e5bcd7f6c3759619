"""What lies in a staging buffer: which tokens, layers and heads of a span, in which order. Pure; no memory here.

A side that gives gathers a chunk of its pages into a slot of its buffer, and writes from there to a slot that the side
that takes has lent, which puts it into its own pages, whatever their size, heads and dtype.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mini_infer_engine.kv_transfer.layout import HeadShare, KVLayout, Span, shares_to_write

Area = Literal["device", "host"]
"""Where a staging buffer is: beside the page pool, or in main memory, pinned where the pool is on a GPU."""

SLOTS_EACH_WAY = 8
"""Of a buffer: for what is given, and as many for what is taken."""
GIVEN, LENT = range(SLOTS_EACH_WAY), range(SLOTS_EACH_WAY, 2 * SLOTS_EACH_WAY)
"""Their numbers: those that are filled here, and those that are lent to others."""


class Slots:
    """Slots of one staging buffer, of all ranks alike; free ones are handed out in turn."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._free = deque(numbers)

    def take(self) -> int | None:
        """None: all are in use."""
        return self._free.popleft() if self._free else None

    def free(self, slot: int) -> None:
        """Nobody needs what is in it."""
        self._free.append(slot)


class StagingBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one rank."""

    address: Annotated[int, Meta(ge=0)]
    """Of the first slot, in its process."""
    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 48)]
    device: Literal["cpu", "cuda"]
    device_index: Annotated[int, Meta(ge=0, le=1024)]


def slot_bytes_of(staging_bytes: int, layout: KVLayout) -> int:
    """A slot's size where a buffer has so many bytes; a layer of a page fits in any case."""
    return max(staging_bytes // (2 * SLOTS_EACH_WAY), layout.layer_bytes)


def moves_whole_pages(giver: KVLayout, taker: KVLayout) -> bool:
    """Whether a page of one side is one of the other, byte for byte."""
    return (giver.page_size, giver.num_heads, giver.dtype) == (taker.page_size, taker.num_heads, taker.dtype)


def _unit(giver: KVLayout, taker: KVLayout) -> tuple[int, int]:
    """The fewest tokens that a chunk can have, and their bytes in one layer, in the fuller of both sides' slots."""
    if moves_whole_pages(giver, taker):
        return giver.page_size, giver.layer_bytes
    given = max(sum(share.count for share in shares_to_write(giver, rank, taker)) for rank in range(giver.tp_size))
    return 1, max(given, taker.num_heads) * giver.halves * giver.head_bytes


def chunks(giver: KVLayout, taker: KVLayout, span: Span, slot_bytes: int) -> list[Span]:
    """A span in parts that fit into a slot, in order. ValueError: a slot does not hold one layer of the least part."""
    low, high = span.layers or (0, giver.num_layers)
    unit, unit_bytes = _unit(giver, taker)
    layers = min(high - low, slot_bytes // unit_bytes)
    if not layers:
        raise ValueError(
            f"a staging slot of {slot_bytes} bytes is too small for {unit_bytes}: raise --kv-staging-memory"
        )
    tokens = slot_bytes // (unit_bytes * layers) * unit if layers == high - low else unit
    return [
        msgspec.structs.replace(span, begin=begin, end=min(begin + tokens, span.end), layers=(first, last))
        for begin in range(span.begin - span.begin % unit, span.end, tokens)
        for first, last in _ranges(low, high, layers)
    ]


def _ranges(low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(low, high, size):
        yield first, min(first + size, high)


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank that gives has in its slot for one that takes: it is written in one piece."""

    giver_rank: int
    taker_rank: int
    offset: int
    """In the slot."""
    size: int
    share: HeadShare
    """Of the side that gives: `our_first` is among its heads, `their_first` among the taker's."""


def blocks(giver: KVLayout, rank: int, taker: KVLayout, span: Span) -> list[Block]:
    """What is in the slot of a rank that gives, in order."""
    low, high = span.layers or (0, giver.num_layers)
    num_pages = -(-span.end // giver.page_size) - span.begin // giver.page_size
    found, offset = [], 0
    for share in shares_to_write(giver, rank, taker):
        if moves_whole_pages(giver, taker):
            size = num_pages * (high - low) * giver.layer_bytes
        else:
            size = (span.end - span.begin) * (high - low) * giver.halves * share.count * giver.head_bytes
        found.append(Block(rank, share.their_rank, offset, size, share))
        offset += size
    return found


def blocks_for(giver: KVLayout, taker: KVLayout, rank: int, span: Span) -> list[tuple[Block, int]]:
    """What all ranks that give write to the slot of one that takes, each with its offset there, in order."""
    found, offset = [], 0
    for giver_rank in range(giver.tp_size):
        for block in blocks(giver, giver_rank, taker, span):
            if block.taker_rank == rank:
                found.append((block, offset))
                offset += block.size
    return found
