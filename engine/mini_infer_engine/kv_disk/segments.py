"""Tracks the segment files of a log: where the next page is written, and which files are dropped for it. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

MOST_SEGMENT_BYTES = 256 << 20
_LEAST_SEGMENTS = 4
"""Segments into which the smallest log is divided, of which one is dropped at a time."""
ALIGNMENT = 4096
"""Alignment of everything in a file, as direct I/O needs it."""


def aligned(num_bytes: int) -> int:
    """Returns the next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class LogLayout:
    """The sizes of a log, in bytes. A slot has a page's header, and then the page."""

    header_bytes: int
    page_bytes: int
    slots_per_segment: int
    num_segments: int

    @classmethod
    def of(cls, page_bytes: int, header_bytes: int, capacity_bytes: int) -> "LogLayout":
        """Divides a capacity. Raises ValueError if it is too small for a few pages."""
        slot_bytes = aligned(header_bytes) + aligned(page_bytes)
        segment_bytes = min(MOST_SEGMENT_BYTES, capacity_bytes // _LEAST_SEGMENTS)
        slots = max(segment_bytes // slot_bytes, 1)
        num_segments = capacity_bytes // (slots * slot_bytes)
        if num_segments < _LEAST_SEGMENTS:
            raise ValueError(
                f"--kv-disk-size {capacity_bytes}: a page takes {slot_bytes:,} bytes there: set at least "
                f"{_LEAST_SEGMENTS * slot_bytes}"
            )
        return cls(aligned(header_bytes), page_bytes, slots, num_segments)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a header and its page."""
        return self.header_bytes + aligned(self.page_bytes)

    def place(self, location: int) -> tuple[int, int]:
        """Returns the segment of a location, and the offset of its slot in that file."""
        segment, slot = divmod(location, self.slots_per_segment)
        return segment, slot * self.slot_bytes


class SegmentLog:
    """The numbers of the segments that exist, and the slot that is written next. Segments are never reused.

    The log is bounded by the slots of all segments together: a process that ends early leaves a short segment, which
    takes the room of what it has.
    """

    def __init__(self, layout: LogLayout, existing: Mapping[int, int]) -> None:
        """Takes the segments that a former process has left, and the bytes of each; none of them is written to again.
        More than the log may have are there until `trim` is called.
        """
        self._layout = layout
        self._slots = {number: -(-existing[number] // layout.slot_bytes) for number in sorted(existing)}
        """The slots of each segment, the oldest first."""
        self._num_slots = sum(self._slots.values())
        self._next = (max(existing) + 1 if existing else 0) * layout.slots_per_segment

    @property
    def segments(self) -> list[int]:
        """The segments that exist, the oldest first."""
        return list(self._slots)

    def __contains__(self, segment: int) -> bool:
        return segment in self._slots

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots of all segments; that being written counts as far as it is."""
        return self._num_slots * self._layout.slot_bytes

    def append(self) -> tuple[int, list[int]]:
        """Returns the location for the next page, and the segments that are dropped for it, the oldest."""
        location = self._next
        self._next += 1
        segment = location // self._layout.slots_per_segment
        self._slots[segment] = self._slots.get(segment, 0) + 1
        self._num_slots += 1
        return location, self.trim()

    def trim(self) -> list[int]:
        """Drops the oldest segments until the others are no larger than the log may be, and returns them."""
        dropped, most = list[int](), self._layout.num_segments * self._layout.slots_per_segment
        while self._num_slots > most:
            oldest = next(iter(self._slots))
            self._num_slots -= self._slots.pop(oldest)
            dropped.append(oldest)
        return dropped

    def locations(self, segment: int) -> range:
        """Returns the locations of a segment."""
        slots = self._layout.slots_per_segment
        return range(segment * slots, (segment + 1) * slots)

    def clear(self) -> list[int]:
        """Drops all segments, and returns them. The next page begins a new one."""
        dropped, self._slots, self._num_slots = self.segments, {}, 0
        self._next = -(-self._next // self._layout.slots_per_segment) * self._layout.slots_per_segment
        return dropped
