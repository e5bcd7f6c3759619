"""Splits server-sent events at the ends of whole events, so that a part of an event is never sent on.

Nothing is removed or added: all input comes out, possibly later. The format is that of the HTML standard,
https://html.spec.whatwg.org/multipage/server-sent-events.html: an event ends with an empty line.
"""

import re
from typing import ClassVar

LONGEST_EVENT_BYTES = 4 << 20
"""Longest event; more bytes without an empty line are not an event stream, and are passed on as they arrive."""

SHORT_EVENT_BYTES = 32 << 10
"""Longest unfinished event that every stream may buffer in any case."""
LONG_EVENTS_BYTES = 32 << 20
"""Bytes of longer unfinished events that all streams buffer together; beyond it they are passed on as they arrive."""
_LONGEST_END = 4
"""Bytes of the longest end of an event."""

_COMMENTS = re.compile(rb"(?:(?::[^\r\n]*(?:\r\n|\r|\n))+(?:\r\n|\r|\n))+")
_ERRORS = (b'data: {"error"', b"event: error")
"""Beginnings of an error event: OpenAI's, and the named event of other APIs."""


class EventSplitter:
    """The splitter of one stream."""

    _buffered_bytes: ClassVar[int] = 0
    """Bytes that all splitters of the process buffer beyond what each may in any case."""

    __slots__ = ("_buffer", "_counted_bytes")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._counted_bytes = 0

    def __del__(self) -> None:
        """Stops counting what the stream's end left in the buffer."""
        self._count(0)

    def feed(self, piece: bytes) -> bytes:
        """Returns the whole events that `piece` completes; b"" if it completes none."""
        buffer = self._buffer
        if not buffer and piece.endswith(b"\n\n"):
            return piece
        # No end lies within the bytes of before, so each byte is searched once, however small the pieces are.
        begin = max(0, len(buffer) - _LONGEST_END + 1)
        buffer += piece
        end = _last_end(buffer, begin)
        if not end and not self._may_buffer():
            end = len(buffer)
        events = bytes(buffer[:end])
        if end:
            del buffer[:end]
        self._count(max(0, len(buffer) - SHORT_EVENT_BYTES))
        return events

    def rest(self) -> bytes:
        """Returns the bytes after the last whole event, for a stream that ended normally."""
        return bytes(self._buffer)

    def _may_buffer(self) -> bool:
        size = len(self._buffer)
        if size <= SHORT_EVENT_BYTES:
            return True
        others = EventSplitter._buffered_bytes - self._counted_bytes
        return size <= LONGEST_EVENT_BYTES and (not others or others + size <= LONG_EVENTS_BYTES)

    def _count(self, counted_bytes: int) -> None:
        EventSplitter._buffered_bytes += counted_bytes - self._counted_bytes
        self._counted_bytes = counted_bytes


def without_comments(events: bytes) -> bytes:
    """Returns whole events without the comments before the first of them, which only keep a connection alive."""
    found = _COMMENTS.match(events)
    return events[found.end() :] if found else events


def may_have_error(events: bytes) -> bool:
    """Returns False if `has_error` is certainly False, which is nearly always the case."""
    return b"error" in events and any(mark in events for mark in _ERRORS)


def has_error(events: bytes) -> bool:
    """True if one of these whole events is an error. Quotes and line ends inside JSON strings are escaped."""
    for mark in _ERRORS:
        position = events.find(mark)
        if position >= 0 and (position == 0 or events[position - 1] in b"\r\n"):
            return True
    return False


def _last_end(data: bytearray, begin: int) -> int:
    """Returns the position after the last whole event that ends behind `begin`; 0 if there is none."""
    end = data.rfind(b"\n\n", begin) + 2
    end = end if end > 1 else 0
    if data.find(b"\r", begin) >= 0:
        for blank in (b"\r\n\r\n", b"\r\r"):
            position = data.rfind(blank, begin)
            end = max(end, position + len(blank)) if position >= 0 else end
    return end
