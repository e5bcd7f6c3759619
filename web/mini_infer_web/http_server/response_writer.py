"""Writes the common forms of a response, a whole one or one more chunk of a stream, to the client's connection at once.

uvicorn's `send` writes head and body one by one, each a system call and a packet, and is a coroutine for every chunk.
Here both are plain calls that leave its state of the request as `send` would. An unusual response is not written: call
`send` then.
"""

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mini_infer_web.asgi import Headers

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
    if status.value >= 200 and status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
}
"""Status lines of answers that have a body."""


class ResponseWriter:
    """Writes the response of one request."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def whole(self, status: int, headers: Headers, body: bytes) -> bool:
        """Writes head and body in one call; `headers` are in lower case, with the body's Content-Length.

        Returns False, with nothing written, if the client is slow or gone, or the connection ends with this answer.
        """
        cycle = self._cycle
        line = _STATUS_LINES.get(status)
        if line is None or cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
            return False
        if not cycle.keep_alive or cycle.default_headers or cycle.scope["method"] == "HEAD":
            return False
        lines = [line]
        length = b""
        for header in headers:
            name = header[0]
            if name == b"content-length":
                length = header[1]
            elif name in (b"connection", b"transfer-encoding"):
                return False
            lines.append(b"%b: %b\r\n" % header)
        head = b"".join(lines)
        if length != b"%d" % len(body) or not head.count(b"\r") == head.count(b"\n") == len(lines) or b"\0" in head:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.chunked_encoding = cycle.waiting_for_100_continue = False
        cycle.transport.write(b"%b\r\n%b" % (head, body))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def chunk(self, body: bytes) -> bool:
        """Writes a part, which is not empty, of a response that has begun and has no length. Returns False as `whole`
        does.
        """
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or cycle.flow.write_paused:
            return False
        if cycle.scope["method"] == "HEAD":
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True
