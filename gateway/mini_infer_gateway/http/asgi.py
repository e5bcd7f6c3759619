"""Helpers for plain ASGI: reading a body, sending JSON, detecting that the client has disconnected. No framework."""

import json
from collections.abc import Callable

from mini_infer_web.api_errors import OPENAI_ERRORS, ApiError, ErrorShape
from mini_infer_web.asgi import PIECE_BYTES, Headers, Message, Receive, Scope, Send, pieces_of
from mini_infer_web.http_server.response_writer import ResponseWriter
from mini_infer_web.request_body import check_media_type, unpacked_in_slices


class Sender:
    """The `send` of a request: adds headers to its response, and records its status."""

    __slots__ = ("_headers", "_send", "_writer", "last", "status")

    def __init__(
        self, send: Send, headers: Headers, last: Callable[[], bool], writer: ResponseWriter | None = None
    ) -> None:
        """`last` is called when the head is sent, and returns True if the connection is to be closed after this
        response.

        `writer` writes the same response as `send`; None if the server has no such writer.
        """
        self._send, self._headers, self.last, self._writer = send, headers, last, writer
        self.status = 0
        """Status of the response that was sent; 0 if none was."""

    async def __call__(self, message: Message) -> None:
        """Sends an ASGI message, and adds the headers to a response's start."""
        if not self.status and message["type"] == "http.response.start":
            headers = [*message["headers"], *self._headers]
            if self.last():
                headers.append((b"connection", b"close"))
            await self._send({**message, "headers": headers})
            self.status = message["status"]
            return
        await self._send(message)

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole response; `headers` include its Content-Length."""
        in_one = self._writer is not None and not self.status and not self.last()
        if in_one and self._writer and self._writer.whole(status, headers + self._headers, body):
            self.status = status
            return
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})

    def try_chunk(self, body: bytes) -> bool:
        """Sends a part of a response that has begun. Returns False if it was not sent, as when the client is slow."""
        return self._writer is not None and self._writer.chunk(body)


class ClientDisconnectedError(Exception):
    """The client closed its connection, so that nobody waits for an answer."""


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, reserve: Callable[[int], bool], is_form: bool = False
) -> bytes:
    """Returns the request's body, decompressed. `is_form` is True if it may be a form.

    Raises ApiError: 413 if the body is longer than the limit, 415 if its media type is not JSON, 503 if there is no
    `reserve`.
    """
    if scope["method"] == "POST" and not is_form:
        check_media_type(_header(scope, b"content-type"))
    body = await _read(scope, receive, limit_bytes, reserve)
    encoding = _header(scope, b"content-encoding")
    if not encoding:
        return body
    whole = await unpacked_in_slices(body, encoding, limit_bytes, reserve)
    if whole is None:
        raise body_memory_error()
    return whole


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found.decode("latin-1")
    return ""


async def _read(scope: Scope, receive: Receive, limit_bytes: int, reserve: Callable[[int], bool]) -> bytes:
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if announced.isdigit():
        if int(announced) > limit_bytes:
            raise _too_large(limit_bytes)
        if not reserve(int(announced)):
            raise body_memory_error()
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if not reserve(size):
            raise body_memory_error()
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def body_memory_error() -> ApiError:
    """Returns the 503 for a body for which there is no memory now."""
    message = "too many large requests are being read at once: try again shortly"
    return ApiError(503, message, code="out_of_memory", headers={"retry-after": "1", "connection": "close"})


def _too_large(limit_bytes: int) -> ApiError:
    # The rest of the body is not read, so this connection cannot be used again.
    message = f"the request body is longer than the limit of {limit_bytes} bytes: send a shorter prompt"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: bytes = b"application/json", headers: Headers | None = None
) -> None:
    """Sends a whole response."""
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send_whole(send, status, start, body)


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Sends a whole response; `headers` include its Content-Length.

    A long body goes in pieces, each when the client has taken most of those before it: the connection of a client that
    reads nothing buffers no more than one.
    """
    if len(body) > PIECE_BYTES:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in pieces_of(body):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    elif isinstance(send, Sender):
        await send.whole(status, headers, body)
    else:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, content: object, headers: Headers | None = None) -> None:
    """Sends a whole JSON response."""
    await send_bytes(send, status, json.dumps(content).encode(), headers=headers)


async def send_error(send: Send, error: ApiError, request_id: str, shape: ErrorShape = OPENAI_ERRORS) -> None:
    """Sends an error in the shape of the API that the path belongs to."""
    own = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send_json(send, error.status, shape.body(error, request_id), own)


def websocket_denial(send: Send) -> Send:
    """Returns a `send` whose response rejects a WebSocket handshake (ASGI's extension `websocket.http.response`)."""

    async def deny(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return deny


async def client_disconnected(receive: Receive) -> None:
    """Returns when the client closes its connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
