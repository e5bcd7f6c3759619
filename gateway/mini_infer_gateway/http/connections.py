"""uvicorn's HTTP connection with limits: on headers, on clients that are slow to send or to read, on their number.

One look at all connections a second finds what has taken too long, so that a request pays for no timers. What is broken
off for it is answered where an answer can still be read. Knows no requests.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.asgi import Scope
from mini_infer_contract.http_connection import HttpConnection
from mini_infer_gateway.http.response_writer import ResponseWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a client may do with a connection."""

    max_connections: int = 8192
    """Each takes some 20 KiB."""
    max_header_bytes: int = 64 << 10
    """Of one request; servers allow 8 to 64 KiB."""
    idle_timeout_s: float = 30.0
    """Without the beginning of a first request."""
    head_timeout_s: float = 20.0
    """From a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """For a body to arrive, and a second more for every `min_body_rate` bytes of it."""
    min_body_rate: int = 16 << 10
    """Bytes a second."""
    write_timeout_s: float = 60.0
    """For a client to read anything of what waits for it."""


CLIENT_LINK = "mini_infer_client_link"
"""In a scope: the `ClientLink` of the connection that the request came over."""
RESPONSE_WRITER = "mini_infer_response_writer"
"""In a scope: the request's `ResponseWriter`, which is to be taken out: it refers to the scope."""


class ClientLink:
    """Tells the request that is being served that its client's connection is lost, without a task that waits for it."""

    __slots__ = ("_lost", "_on_loss", "_resume_reading")

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        """`resume_reading`: without it the loss of a connection whose body filled its buffer is not seen."""
        self._resume_reading, self._lost = resume_reading, False
        self._on_loss: Callable[[], None] | None = None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called when the connection is lost, at once where it is already; the body has been read."""
        if self._lost:
            on_loss()
        else:
            self._on_loss = on_loss
            self._resume_reading()

    def unwatch(self) -> None:
        """The request is over."""
        self._on_loss = None

    def lose(self) -> None:
        """The connection is lost."""
        self._lost = True
        if self._on_loss:
            self._on_loss()


class LimitedConnection(HttpConnection):
    """One connection of a client's."""

    limits = ConnectionLimits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._began_s: float | None = time.monotonic()
        """When the request that is being received began, or the connection before its first; None: none is."""
        self._received_bytes = self._piece_bytes = 0
        """Of that request; of the piece that came last."""
        self._in_head = self._is_new = True
        self._write_paused_s: float | None = None
        self._kept_s: float | None = None
        """Since when it is kept without a request after an answer."""
        self._link = ClientLink(lambda: self.flow.resume_reading())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """See asyncio.Protocol."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._end(ApiError(503, "there are too many connections: try again shortly", code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self._link.lose()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._piece_bytes = len(data)
        self._received_bytes += self._piece_bytes
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head and self._received_bytes > self.limits.max_header_bytes and self._began_s is not None:
            self._end(
                ApiError(
                    431,
                    f"the request's headers have more than {self.limits.max_header_bytes} bytes: send fewer or shorter",
                    code="headers_too_large",
                )
            )

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        cast("Scope", self.scope)[CLIENT_LINK] = self._link
        self._began_s, self._in_head, self._is_new, self._kept_s = time.monotonic(), True, False, None
        self._received_bytes = self._piece_bytes

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._in_head = False
        before = self.cycle
        super().on_headers_complete()
        if (cycle := self.cycle) is not None and cycle is not before:
            cast("Scope", self.scope)[RESPONSE_WRITER] = ResponseWriter(cycle)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._began_s = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn, which sets a timer for each answer to end the connection with."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._kept_s = time.monotonic()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._write_paused_s = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._write_paused_s = None
        super().resume_writing()

    def look(self, now_s: float) -> None:
        """Ends the connection if its client has taken too long."""
        limits = self.limits
        if self._write_paused_s is not None and now_s - self._write_paused_s > limits.write_timeout_s:
            self.transport.abort()
            return
        if self.transport.is_closing():
            return
        if self._kept_s is not None and now_s - self._kept_s > self.timeout_keep_alive:
            self.transport.close()
        if self._began_s is None:
            return
        waited_s = now_s - self._began_s
        if self._is_new:
            if waited_s > limits.idle_timeout_s:
                self.transport.close()
        elif self._in_head:
            if waited_s > limits.head_timeout_s:
                self._end(_too_slow("headers", limits.head_timeout_s, "headers_timeout"))
        elif waited_s > limits.body_timeout_s + self._received_bytes / limits.min_body_rate:
            self._end(_too_slow("body", waited_s, "body_timeout"))

    def _end(self, error: ApiError) -> None:
        """Answers if no answer has begun, and closes."""
        began = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not began:
            body = json.dumps(error.body()).encode()
            head = f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            # An application that waits for the rest of a body is told that the client has gone.
            self.transport.close()
        else:
            self.transport.abort()


_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


def _too_slow(what: str, seconds: float, code: str) -> ApiError:
    return ApiError(408, f"the request's {what} did not arrive within {seconds:.0f} s: send faster", code=code)


def limited(limits: ConnectionLimits) -> type[LimitedConnection]:
    """The class of connections with these limits, for uvicorn's `http`."""
    return type("Limited", (LimitedConnection,), {"limits": limits})


def look_at_all(state: ServerState, now_s: float) -> None:
    """Ends the connections whose clients have taken too long; to be called about once a second."""
    for connection in list(state.connections):
        if isinstance(connection, LimitedConnection):
            connection.look(now_s)
