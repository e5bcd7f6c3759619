"""Tracks the segment files of a log: where the next page is written, and which files are dropped for it. No I/O."""

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
    """The numbers of the segments that exist, and the slot that is written next. Segments are never reused."""

    def __init__(self, layout: LogLayout, existing: list[int]) -> None:
        """Takes the segments that a former process has left; none of them is written to again."""
        self._layout = layout
        self.segments = sorted(existing)
        self._next = (self.segments[-1] + 1 if self.segments else 0) * layout.slots_per_segment

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots of all segments; that being written counts as far as it is."""
        layout = self._layout
        used_slots = len(self.segments) * layout.slots_per_segment
        if self.segments and (left := -self._next % layout.slots_per_segment):
            used_slots -= left
        return used_slots * layout.slot_bytes

    def append(self) -> tuple[int, list[int]]:
        """Returns the location for the next page, and the segments that are dropped for it, the oldest."""
        location, dropped = self._next, list[int]()
        self._next += 1
        segment = location // self._layout.slots_per_segment
        if not self.segments or self.segments[-1] != segment:
            self.segments.append(segment)
            while len(self.segments) > self._layout.num_segments:
                dropped.append(self.segments.pop(0))
        return location, dropped

    def locations(self, segment: int) -> range:
        """Returns the locations of a segment."""
        slots = self._layout.slots_per_segment
        return range(segment * slots, (segment + 1) * slots)

    def clear(self) -> list[int]:
        """Drops all segments, and returns them. The next page begins a new one."""
        dropped, self.segments = self.segments, []
        self._next = -(-self._next // self._layout.slots_per_segment) * self._layout.slots_per_segment
        return dropped
