"""Manages the staging buffers of one rank: gathers tokens into slots, and copies those that peers have written to
pages.
"""

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.staging.staging_copies import IsDone, StagingCopies, open_copies
from mini_infer_engine.kv_transfer.staging_slots import (
    SLOTS_PER_DIRECTION,
    Area,
    StagingBuffer,
    blocks,
    blocks_for,
    slot_bytes_of,
)
from mini_infer_engine.kv_transfer.transport import Motion, Progress, TransportError


class NixlStaging:
    """One staging buffer: slots for sending, followed by slots for receiving, to which peers write."""

    def __init__(self, memory: KVMemory, area: Area, staging_bytes: int) -> None:
        self._memory = memory
        slot_bytes = slot_bytes_of(staging_bytes, memory.layout)
        self.num_bytes = 2 * SLOTS_PER_DIRECTION * slot_bytes
        self._copies: StagingCopies = open_copies(memory, area, self.num_bytes)
        self.buffer = StagingBuffer(
            address=self._copies.address,
            slot_bytes=slot_bytes,
            device="cuda" if self._copies.device == "cuda" else "cpu",
            device_index=memory.device_index,
        )

    def gather(self, rank: int, consumer: KVLayout, slot: int, span: Span) -> Motion:
        """Begins to fill a slot with the blocks of this rank."""
        producer, begin = self._memory.layout, slot * self.buffer.slot_bytes
        gathered = blocks(producer, rank, consumer, span)
        for block in gathered:
            self._copies.gather(producer, consumer, span, block, begin + block.offset)
        return _Copy(self._copies.mark(), sum(block.size for block in gathered))

    def place(self, rank: int, producer: KVLayout, slot: int, span: Span) -> Motion:
        """Begins to copy the blocks that peers have written to a slot for this rank into its pages.

        Raises TransportError if the blocks do not fit into a slot, by the layout that the peer claims.
        """
        consumer, begin = self._memory.layout, slot * self.buffer.slot_bytes
        scattered = blocks_for(producer, consumer, rank, span)
        num_bytes = sum(block.size for block, _ in scattered)
        if num_bytes > self.buffer.slot_bytes:  # by what a peer says of it: other slots are others'
            raise TransportError(f"a part of {num_bytes} bytes does not fit into a slot of {self.buffer.slot_bytes}")
        for block, offset in scattered:
            self._copies.scatter(producer, consumer, span, block, begin + offset)
        return _Copy(self._copies.mark(), num_bytes)


class _Copy:
    """A `Motion` of copies within this process, which cannot fail."""

    def __init__(self, is_done: IsDone, num_bytes: int) -> None:
        self._is_done, self.num_bytes = is_done, num_bytes

    def progress(self) -> Progress:
        """Returns `done` once the copies have ended."""
        return "done" if self._is_done() else "busy"
