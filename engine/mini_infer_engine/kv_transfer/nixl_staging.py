"""The staging buffers of one rank: what is gathered into their slots, and what NIXL reads from a peer's into ours."""

import logging
from collections import deque
from collections.abc import Callable

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.staging import (
    SLOTS_EACH_WAY,
    Area,
    Block,
    StagingBuffer,
    blocks,
    blocks_for,
    slot_bytes_of,
)
from mini_infer_engine.kv_transfer.staging_copies import IsDone, StagingCopies, open_copies
from mini_infer_engine.kv_transfer.transport import Motion, Motions, Progress

log = logging.getLogger(__name__)

Read = Callable[[int, list[tuple[Block, int, int]]], Motion]
"""Begin to read blocks that a rank has staged, each with its offset in our buffer and in that rank's."""


class NixlStaging:
    """One buffer: slots for what is given, which peers read, and behind them slots for what is taken."""

    def __init__(self, memory: KVMemory, area: Area, staging_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes_of(staging_bytes, memory.layout)
        self.num_bytes = 2 * SLOTS_EACH_WAY * self._slot_bytes
        self._copies: StagingCopies = open_copies(memory, area, self.num_bytes)
        self._free = deque(range(SLOTS_EACH_WAY, 2 * SLOTS_EACH_WAY))
        self.buffer = StagingBuffer(
            address=self._copies.address,
            slot_bytes=self._slot_bytes,
            device="cuda" if self._copies.device == "cuda" else "cpu",
            device_index=memory.device_index,
        )

    def gather(self, rank: int, taker: KVLayout, slot: int, span: Span) -> Motion:
        """Fill a slot with what this rank gives."""
        giver, num_bytes = self._memory.layout, 0
        for block in blocks(giver, rank, taker, span):
            self._copies.gather(giver, taker, span, block, slot * self._slot_bytes + block.offset)
            num_bytes += block.size
        return _Gather(self._copies.mark(), num_bytes)

    def fetch(
        self, rank: int, giver: KVLayout, theirs: list[StagingBuffer], slot: int, span: Span, read: Read
    ) -> Motion:
        """Read what this rank takes of the peer's slots, by rank there, and put it in place."""
        return _Fetch(self, blocks_for(giver, self._memory.layout, rank, span), giver, theirs, slot, span, read)

    def take_slot(self) -> int | None:
        """One for what is taken, where one is free."""
        return self._free.popleft() if self._free else None

    def free_slot(self, slot: int) -> None:
        """What was in it is in its place, or wanted no more."""
        self._free.append(slot)

    def offset_of(self, slot: int) -> int:
        """In the buffer."""
        return slot * self._slot_bytes

    def scatter(self, giver: KVLayout, span: Span, placed: list[tuple[Block, int]]) -> IsDone:
        """Put what was read, at these offsets in the buffer, where it belongs."""
        for block, offset in placed:
            self._copies.scatter(giver, self._memory.layout, span, block, offset)
        return self._copies.mark()


class _Gather:
    def __init__(self, is_done: IsDone, num_bytes: int) -> None:
        self._is_done, self.num_bytes = is_done, num_bytes

    def progress(self) -> Progress:
        """See `Motion.progress`."""
        return "done" if self._is_done() else "busy"


class _Fetch:
    """Waits for a slot, reads, puts in place."""

    def __init__(
        self,
        staging: NixlStaging,
        wanted: list[Block],
        giver: KVLayout,
        theirs: list[StagingBuffer],
        their_slot: int,
        span: Span,
        read: Read,
    ) -> None:
        self._staging, self._wanted, self._giver, self._theirs = staging, wanted, giver, theirs
        self._their_slot, self._span, self._read = their_slot, span, read
        self.num_bytes = sum(block.size for block in wanted)
        self._slot: int | None = None
        self._reading: Motions | None = None
        self._placed: list[tuple[Block, int]] = []
        self._is_placed: IsDone | None = None
        self._end: Progress = "busy"
        self._begin()

    def progress(self) -> Progress:
        """See `Motion.progress`."""
        if self._end != "busy":
            return self._end
        if self._reading is None:
            self._begin()
        elif self._is_placed is None:
            self._look_at(self._reading)
        elif self._is_placed():
            self._finish("done")
        return self._end

    def _begin(self) -> None:
        slot = self._staging.take_slot()
        if slot is None:
            return
        self._slot, offset = slot, self._staging.offset_of(slot)
        motions: list[Motion] = []
        has_failed = False
        for rank, theirs in enumerate(self._theirs):
            group = []
            for block in self._wanted:
                if block.giver_rank == rank:
                    group.append((block, offset, self._their_slot * theirs.slot_bytes + block.offset))
                    self._placed.append((block, offset))
                    offset += block.size
            try:
                motions += [self._read(rank, group)] if group else []
            except Exception as error:  # NIXL has a class of its own for each of its faults
                log.info("a read of what was staged cannot begin: %s", error)
                has_failed = True
        self._reading = Motions(motions, has_failed=has_failed)

    def _look_at(self, reading: Motions) -> None:
        match reading.progress():
            case "failed":
                self._finish("failed")
            case "done":
                self._is_placed = self._staging.scatter(self._giver, self._span, self._placed)

    def _finish(self, end: Progress) -> None:
        self._end = end
        if self._slot is not None:
            self._staging.free_slot(self._slot)
