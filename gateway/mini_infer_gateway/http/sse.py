"""Server-sent events as bytes: where whole events end, so that half of one is never sent on.

Takes nothing away and adds nothing: what goes in comes out, later at most. The form is that of the HTML standard,
https://html.spec.whatwg.org/multipage/server-sent-events.html: an event ends with an empty line.
"""

import re

LONGEST_EVENT_BYTES = 4 << 20
"""More than this without an empty line is no event stream: it is passed on as it comes."""

_COMMENTS = re.compile(rb"(?:(?::[^\r\n]*(?:\r\n|\r|\n))+(?:\r\n|\r|\n))+")
_ERRORS = (b'data: {"error"', b"event: error")
"""How it begins: OpenAI's, and the named one of other APIs."""


class EventSplitter:
    """Of one stream."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """The whole events that `piece` completes; b"" where there are none yet."""
        if not self._held and piece.endswith(b"\n\n"):
            return piece
        data = self._held + piece
        end = _last_end(data)
        if not end and len(data) > LONGEST_EVENT_BYTES:
            end = len(data)
        self._held = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What came after the last whole event, of a stream that ended in good order."""
        return self._held


def without_comments(events: bytes) -> bytes:
    """Whole events without the comments before the first of them, which only keep a connection alive."""
    found = _COMMENTS.match(events)
    return events[found.end() :] if found else events


def may_have_error(events: bytes) -> bool:
    """False: `has_error` is False, which is nearly always so."""
    return b"error" in events and any(mark in events for mark in _ERRORS)


def has_error(events: bytes) -> bool:
    """Whether one of these whole events is an error: quotes and line ends inside of JSON strings are escaped."""
    for mark in _ERRORS:
        position = events.find(mark)
        if position >= 0 and (position == 0 or events[position - 1] in b"\r\n"):
            return True
    return False


def _last_end(data: bytes) -> int:
    """Where the last whole event ends; 0: none does."""
    end = data.rfind(b"\n\n") + 2
    end = end if end > 1 else 0
    if b"\r" in data:
        for blank in (b"\r\n\r\n", b"\r\r"):
            position = data.rfind(blank)
            end = max(end, position + len(blank)) if position >= 0 else end
    return end
