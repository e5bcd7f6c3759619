"""Computes the contents of staging slots: which tokens, layers and heads of a span, in which order. Pure; no memory
here.

The producer gathers a chunk of its pages into a slot of its own buffer, and writes it to a slot that the consumer has
lent. The consumer copies it into its own pages, whatever their size, heads and dtype.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mini_infer_engine.kv_transfer.layout import HeadShare, KVLayout, Span, shares_to_write

Area = Literal["device", "host"]
"""Location of a staging buffer: on the page pool's device, or in main memory, pinned if the pool is on a GPU."""

SLOTS_PER_DIRECTION = 8
"""Slots of a buffer for each direction: this many for sending, and as many for receiving."""
SEND_SLOTS, RECEIVE_SLOTS = range(SLOTS_PER_DIRECTION), range(SLOTS_PER_DIRECTION, 2 * SLOTS_PER_DIRECTION)
"""Numbers of the slots that are filled here for sending, and of those that are lent to peers."""


class Slots:
    """Allocates the slots of one staging buffer, with the same numbers on all ranks. Slots are reused in FIFO order."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._free = deque(numbers)

    def take(self) -> int | None:
        """Returns a free slot, or None if all are in use."""
        return self._free.popleft() if self._free else None

    def free(self, slot: int) -> None:
        """Frees a slot."""
        self._free.append(slot)


class StagingBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's staging buffer, as its peers address it."""

    address: Annotated[int, Meta(ge=0)]
    """Address of the first slot in its process."""
    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 48)]
    device: Literal["cpu", "cuda"]
    device_index: Annotated[int, Meta(ge=0, le=1024)]


def slot_bytes_of(staging_bytes: int, layout: KVLayout) -> int:
    """Returns the bytes of a slot of a buffer of this size, at least one layer of a page."""
    return max(staging_bytes // (2 * SLOTS_PER_DIRECTION), layout.layer_bytes)


def moves_whole_pages(producer: KVLayout, consumer: KVLayout) -> bool:
    """Returns True if the pages of both sides are equal byte for byte, so that they are copied whole."""
    return (producer.page_size, producer.num_heads, producer.dtype) == (
        consumer.page_size,
        consumer.num_heads,
        consumer.dtype,
    )


def _unit(producer: KVLayout, consumer: KVLayout) -> tuple[int, int]:
    """Returns the fewest tokens that a chunk can have, and their bytes in one layer, on the side whose slots get more
    of them.
    """
    if moves_whole_pages(producer, consumer):
        return producer.page_size, producer.layer_bytes
    sent_heads = max(
        sum(share.count for share in shares_to_write(producer, rank, consumer)) for rank in range(producer.tp_size)
    )
    return 1, max(sent_heads, consumer.num_heads) * producer.halves * producer.head_bytes


def chunks(producer: KVLayout, consumer: KVLayout, span: Span, slot_bytes: int) -> list[Span]:
    """Divides a span into parts that fit into a slot, in order. Raises ValueError if a slot is smaller than one layer
    of the smallest part.
    """
    low, high = span.layers or (0, producer.num_layers)
    unit, unit_bytes = _unit(producer, consumer)
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
    """The part of a slot that goes from one rank of the producer to one of the consumer, in one contiguous write."""

    producer_rank: int
    consumer_rank: int
    offset: int
    """Bytes from the begin of the producer's slot."""
    size: int
    share: HeadShare
    """The heads: `our_first` counts among the producer rank's heads, `their_first` among the consumer rank's."""


def blocks(producer: KVLayout, rank: int, consumer: KVLayout, span: Span) -> list[Block]:
    """Returns the blocks in the slot of one rank of the producer, in order."""
    low, high = span.layers or (0, producer.num_layers)
    num_pages = -(-span.end // producer.page_size) - span.begin // producer.page_size
    found, offset = [], 0
    for share in shares_to_write(producer, rank, consumer):
        if moves_whole_pages(producer, consumer):
            size = num_pages * (high - low) * producer.layer_bytes
        else:
            size = (span.end - span.begin) * (high - low) * producer.halves * share.count * producer.head_bytes
        found.append(Block(rank, share.their_rank, offset, size, share))
        offset += size
    return found


def blocks_for(producer: KVLayout, consumer: KVLayout, rank: int, span: Span) -> list[tuple[Block, int]]:
    """Returns the blocks that all ranks of the producer write to the slot of one rank of the consumer, each with its
    offset there, in order.
    """
    found, offset = [], 0
    for producer_rank in range(producer.tp_size):
        for block in blocks(producer, producer_rank, consumer, span):
            if block.consumer_rank == rank:
                found.append((block, offset))
                offset += block.size
    return found
