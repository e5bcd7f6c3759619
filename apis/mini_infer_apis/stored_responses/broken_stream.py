"""Ends a response's stream that breaks off with the events of OpenAI's Responses API.

A server that relays streams ends one with `data: {"error": ...}`, as chat completions have it. Here it becomes an event
`error` and `response.failed`, numbered on. Pure, bytes in; knows no sockets and no store.
"""

import re
from typing import Any

import msgspec

from mini_infer_apis.dialects.response_object import with_error
from mini_infer_apis.stored_responses.recorder import data_of, events_in

_BROKEN = b'data: {"error"'
_OF_A_RESPONSE = b"event: response."
MAX_FIRST_BYTES = 256 << 10
"""Bytes of a stream's beginning that are buffered as long as it lasts: a longer response, as many tools may make it, is
not sent again when it fails.
"""
_NUMBER = re.compile(rb'"sequence_number":\s*(\d+)\}\s*$')


class StreamErrors:
    """The errors of one stream. Buffers its first piece, for the response in it, and its last, for its number."""

    def __init__(self) -> None:
        self._first = self._last = b""

    def translated(self, piece: bytes) -> bytes:
        """Returns whole events as their client gets them."""
        if piece.startswith(_BROKEN):
            return self._ended(piece)
        if piece.startswith(_OF_A_RESPONSE):
            self._first = self._first or piece[:MAX_FIRST_BYTES]
            self._last = piece
        return piece

    def _ended(self, piece: bytes) -> bytes:
        error = _error_in(piece)
        if error is None:
            return piece
        number = self._next_number()
        fields = {name: error.get(name) for name in ("code", "message", "param")}
        events = _event("error", fields, number)
        response = self._response()
        if response is None:
            return events
        status = 429 if error.get("type") == "rate_limit_error" else 500
        failed = with_error(response, status, error.get("code"), str(error.get("message")))
        return events + _event("response.failed", {"response": failed}, number + 1)

    def _next_number(self) -> int:
        last = list(events_in(self._last))[-1:]
        found = _NUMBER.search(data_of(last[0])) if last else None
        return int(found[1]) + 1 if found else 0

    def _response(self) -> dict[str, Any] | None:
        """Returns the response object of the stream's first event."""
        first = next(events_in(self._first), b"")
        response = _decoded(data_of(first)).get("response")
        return response if isinstance(response, dict) else None


def websocket_error(data: bytes) -> bytes:
    """Returns an error event as messages of a WebSocket have it, in an object of its own; any other data as it is."""
    if not data.startswith((b'{"type":"error"', b'{"error"')):
        return data
    event = _decoded(data)
    if isinstance(event.get("error"), dict):
        return msgspec.json.encode({"type": "error"} | event)
    error = {"type": "server_error"} | {name: event.get(name) for name in ("code", "message", "param")}
    return msgspec.json.encode({"type": "error", "error": error, "sequence_number": event.get("sequence_number")})


def _error_in(piece: bytes) -> dict[str, Any] | None:
    error = _decoded(data_of(next(events_in(piece), b""))).get("error")
    return error if isinstance(error, dict) else None


def _event(kind: str, fields: dict[str, Any], number: int) -> bytes:
    content = {"type": kind, **fields, "sequence_number": number}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(content))


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
