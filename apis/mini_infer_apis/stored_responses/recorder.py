"""Reads an answer to /v1/responses as it passes: its response object, and events one by one. Pure, bytes in.

A stream has the whole response in its last event, so of all others only the head is looked at. Quotes inside of JSON
strings and the ends of lines in them are escaped, so that no text of a model can look like a head.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

_TERMINAL = tuple(b"event: %b\n" % kind for kind in (b"response.completed", b"response.incomplete", b"response.failed"))
_DATA = b"\ndata: "
MAX_ERROR_BYTES = 64 << 10
"""Bytes of an error's answer that are read; what is longer is no error of a server of ours."""
MAX_WHOLE_BYTES = 64 << 20
"""Most bytes of an answer that is no stream: a larger one is passed on and not kept."""


def events_in(data: bytes) -> Iterator[bytes]:
    """Yields whole events, one by one, without comments that only keep a connection busy."""
    for event in data.split(b"\n\n"):
        if event and not event.startswith(b":"):
            yield event + b"\n\n"


def data_of(event: bytes) -> bytes:
    """Returns the JSON of an event; b"" if it has none."""
    begin = event.find(_DATA)
    if begin >= 0:
        return event[begin + len(_DATA) :].rstrip(b"\n")
    return event.removeprefix(b"data: ").rstrip(b"\n") if event.startswith(b"data: ") else b""


def is_terminal(event: bytes) -> bool:
    """True if the event ends a response."""
    return event.startswith(_TERMINAL)


def response_in(events: bytes) -> dict[str, Any] | None:
    """Returns the finished response in whole events; None if it goes on."""
    if not any(mark in events for mark in _TERMINAL):
        return None
    last = next((event for event in events_in(events) if is_terminal(event)), None)
    return None if last is None else _object(msgspec.json.decode(data_of(last)).get("response"))


class Recorder:
    """Records the response of one answer: a stream of events, or one JSON object."""

    def __init__(self) -> None:
        self.response: dict[str, Any] | None = None
        """The response, once it is complete."""
        self._is_stream = False
        self._is_kept = False
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    @property
    def is_whole(self) -> bool:
        """True if the answer is no stream, so that what has passed of it is buffered."""
        return self._is_kept and not self._is_stream and self.response is None

    def give_up(self) -> None:
        """Drops what has passed: the answer is not kept."""
        self._is_kept = False
        self._pieces.clear()

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Takes the answer's status and headers."""
        self._is_kept = status == 200
        kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
        self._is_stream = kind.lower().startswith(b"text/event-stream")

    def push(self, body: bytes, more: bool) -> bool:
        """Takes the next piece, whole events of a stream. Returns True if `response` is known by it."""
        if not self._is_kept or self.response is not None:
            return False
        try:
            self.response = response_in(body) if self._is_stream else self._whole(body, more)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            self._is_kept = False
        return self.response is not None

    def _whole(self, body: bytes, more: bool) -> dict[str, Any] | None:
        self._pieces.append(body)
        self._size_bytes += len(body)
        if self._size_bytes > MAX_WHOLE_BYTES:
            self.give_up()
        return None if more or not self._is_kept else _object(msgspec.json.decode(b"".join(self._pieces)))


def _object(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) and isinstance(value.get("id"), str) else None
