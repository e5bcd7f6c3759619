"""ASGI in small: its types, and helpers for an application in front of another, which makes new requests and inspects
answers.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl

from mini_infer_web.api_errors import ApiError
from mini_infer_web.api_keys import presented_key

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_OF_THE_BODY = (b"content-length", b"content-encoding", b"content-type", b"transfer-encoding")
PIECE_BYTES = 64 << 10
"""Longest part of a whole response that is written to a connection at once."""
STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
UNBUFFERED_STREAM_HEADERS: Headers = [*STREAM_HEADERS, (b"x-accel-buffering", b"no")]
"""`STREAM_HEADERS` and the header by which nginx sends each piece on at once."""
KEEPALIVE_COMMENT = b": waiting\n\n"
"""Sent in an event stream whose first token takes long, for proxies that cut silent connections; clients skip it."""


def owner_of(scope: Scope) -> str:
    """Returns the owner of a request: a digest of its API key, "" if it has none."""
    key = presented_key(scope["headers"])
    return "" if key is None else sha256(key).hexdigest()


def query_of(scope: Scope) -> dict[str, str]:
    """Returns the query's parameters; the last one counts if a name is repeated."""
    return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))


def pieces_of(body: bytes) -> Iterator[bytes]:
    """Yields a body in parts of at most `PIECE_BYTES`."""
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


def with_body(scope: Scope, size_bytes: int, added: Headers) -> Scope:
    """Returns the scope of the same request with another body, of this size, and more headers."""
    names = {name for name, _ in added}.union(_OF_THE_BODY)
    kept = [header for header in scope["headers"] if header[0] not in names]
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size_bytes)]
    return {**scope, "headers": [*kept, *own, *added]}


def post_scope(scope: Scope, path: str) -> Scope:
    """The scope of a POST on behalf of the client of `scope`, whose own request is another: a WebSocket, say."""
    own = (b"upgrade", b"connection", b"x-request-id")
    headers = [(name, value) for name, value in scope["headers"] if name not in own and name[:14] != b"sec-websocket-"]
    copied = {name: scope[name] for name in ("asgi", "client", "server", "root_path", "app", "state") if name in scope}
    return {
        **copied,
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }


def receive_of(body: bytes, then: Receive) -> Receive:
    """Returns a `Receive` that yields the body once, without retaining it, and then the messages of `then`, such as a
    disconnect.
    """
    bodies = [body]
    del body

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await then()

    return receive


async def send_json(send: Send, content: object, status: int = 200) -> None:
    """Sends a whole JSON answer; `content` in bytes is JSON already."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_in(body: bytes, status: int) -> ApiError:
    """Returns the error in an answer in OpenAI's shape."""
    try:
        error = json.loads(body)["error"]
        return ApiError(status, str(error["message"]), param=error.get("param"), code=error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiError(status, f"the request was answered with status {status}")
