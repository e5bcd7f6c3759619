"""Splits server-sent events at the ends of whole events, so that a part of an event is never sent on.

Nothing is removed or added: all input comes out, possibly later. The format is that of the HTML standard,
https://html.spec.whatwg.org/multipage/server-sent-events.html: an event ends with an empty line.
"""

import re

LONGEST_EVENT_BYTES = 4 << 20
"""Longest event; more bytes without an empty line are not an event stream, and are passed on as they arrive."""

_COMMENTS = re.compile(rb"(?:(?::[^\r\n]*(?:\r\n|\r|\n))+(?:\r\n|\r|\n))+")
_ERRORS = (b'data: {"error"', b"event: error")
"""Beginnings of an error event: OpenAI's, and the named event of other APIs."""


class EventSplitter:
    """The splitter of one stream."""

    def __init__(self) -> None:
        self._buffered = b""

    def feed(self, piece: bytes) -> bytes:
        """Returns the whole events that `piece` completes; b"" if it completes none."""
        if not self._buffered and piece.endswith(b"\n\n"):
            return piece
        data = self._buffered + piece
        end = _last_end(data)
        if not end and len(data) > LONGEST_EVENT_BYTES:
            end = len(data)
        self._buffered = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """Returns the bytes after the last whole event, for a stream that ended normally."""
        return self._buffered


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


def _last_end(data: bytes) -> int:
    """Returns the position after the last whole event; 0 if there is none."""
    end = data.rfind(b"\n\n") + 2
    end = end if end > 1 else 0
    if b"\r" in data:
        for blank in (b"\r\n\r\n", b"\r\r"):
            position = data.rfind(blank)
            end = max(end, position + len(blank)) if position >= 0 else end
    return end
