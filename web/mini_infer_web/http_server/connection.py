"""uvicorn's HTTP connection under limits in every state, from the accepted socket to the last byte sent.

One look at all connections a second finds what has taken too long, so that a request pays for no timers. A client that
breaks a rule gets an answer where it can still read one, and costs one log line. Knows no paths.

Java's HTTP client and `curl --http2` offer HTTP/2 ("Upgrade: h2c") with their first request. A server may ignore that
(RFC 9110, 7.8), but the parser stops there and uvicorn drops the body. Here such a request is parsed again without it.
"""

import asyncio
import json
import time
from array import array
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from mini_infer_web.api_errors import ApiError, shortened
from mini_infer_web.asgi import Scope
from mini_infer_web.http_server.client_link import CLIENT_LINK, ClientLink
from mini_infer_web.http_server.guard import ConnectionGuard
from mini_infer_web.http_server.hosts import AllowedHosts
from mini_infer_web.http_server.limits import (
    LINGER_S,
    MAX_PIPELINED_BYTES,
    MAX_PIPELINED_REQUESTS,
    ConnectionLimits,
)
from mini_infer_web.http_server.peers import Peer, peer_of
from mini_infer_web.http_server.response_writer import ResponseWriter
from mini_infer_web.http_server.upgrade import websocket_refusal
from mini_infer_web.http_server.websocket import LimitedWebSocket

RESPONSE_WRITER = "mini_infer_response_writer"
"""Key in a scope: the request's `ResponseWriter`. Take it out of the scope, since it refers to the scope."""
_OFFERS = (b"connection", b"upgrade", b"http2-settings")
_DIRECT_PIECES = 16
"""Pieces of one head that the parser gets as they come. It joins what it has of a line with each further piece, so
later pieces are gathered until a line ends or there is enough to pay for the joining.
"""
_GATHERED_BYTES = 4096
_MAX_ADDRESS_BYTES = 65_535
"""Bytes of a path with its query that the parser takes."""
_MAX_TRAILERS = 64
_VERSIONS = ("1.1", "1.0")
_CLOSES_AT_ONCE = frozenset(("headers_timeout", "body_timeout", "displaced", "invalid_upgrade"))
"""Codes of refusals whose clients are not in the middle of sending."""


class LimitedConnection(HttpToolsProtocol):
    """One connection of a client. `limited` makes the class of one server."""

    guard = ConnectionGuard(ConnectionLimits())
    has_direct_writes = False
    """True if scopes have a `ClientLink` and a `ResponseWriter`, for applications that know them."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._use_new_parser()
        self._peer: Peer | None = None
        """None before the connection is admitted, and after it is released."""
        self._running: RequestResponseCycle | None = None
        """The request that the application has; `cycle` is the one that came last."""
        self._began_s: float | None = time.monotonic()
        """Time at which the request that is being received began, or the connection before its first request; None if
        none is being received.
        """
        self._received_bytes = self._piece_bytes = 0
        """Bytes received of that request, and bytes of the piece that came last."""
        self._body_bytes = self._since_body_bytes = 0
        self._in_head = self._is_new = True
        self._head_pieces = self._pipelined_bytes = 0
        self._gathered = bytearray()
        self._write_paused_s: float | None = None
        self._kept_s: float | None = None
        """Time since when the connection is kept alive without a request after an answer."""
        self._closing_s: float | None = None
        """Time since when a closed connection waits for its client to take what was sent."""
        self._refusal: ApiError | None = None
        """The error that follows the answers to requests that came before the refused one; nothing is parsed any more.
        """
        self._discards = False
        """True once the refusal was sent: what still comes is dropped until the client has read it and closes (RFC
        9112, 9.6).
        """

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Admits the connection, or answers 503 and closes it."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._link = ClientLink(self.flow.resume_reading)
        try:
            self._peer = self.guard.peers.admit(self, self._address)
        except ApiError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies every request of the connection, and makes room for another connection."""
        self._drop_requests()
        self.guard.slow_readers.remove(self, peer_of(self._address))
        super().connection_lost(exc)
        self._release()
        self._link.lose()

    def data_received(self, data: bytes) -> None:
        """Parses received data, as far as limits allow."""
        if self._refusal is not None or self._discards or self.transport.is_closing():
            return
        self._piece_bytes = len(data)
        self._received_bytes += self._piece_bytes
        self._since_body_bytes += self._piece_bytes
        if self._in_head and self._head_pieces >= _DIRECT_PIECES:
            self._gathered += data
            if b"\n" not in data and len(self._gathered) < _GATHERED_BYTES:
                self._check_sizes()
                return
            data, self._gathered = bytes(self._gathered), bytearray()
        self._head_pieces += 1
        if self.pipeline:
            self._pipelined_bytes += self._piece_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.handle_websocket_upgrade()
            return
        except httptools.HttpParserError as error:
            refusal = error.__context__  # of a callback, of which the error itself says nothing
            if isinstance(refusal, httptools.HttpParserInvalidURLError):
                refusal = _bad_address(self.url)
            self._refuse(refusal if isinstance(refusal, ApiError) else _malformed(error))
            return
        if self._in_head or self._began_s is not None or self.pipeline:
            self._check_sizes()

    def pause_writing(self) -> None:
        """Notes the time since when the client reads nothing."""
        self._write_paused_s = time.monotonic()
        super().pause_writing()
        self.guard.slow_readers.add(self, peer_of(self._address))

    def resume_writing(self) -> None:
        """Notes that the client reads again."""
        self._write_paused_s = None
        self.guard.slow_readers.remove(self, peer_of(self._address))
        super().resume_writing()

    # -- httptools

    def on_message_begin(self) -> None:
        """Begins a request."""
        super().on_message_begin()
        if self.has_direct_writes:
            scope: Scope = self.scope  # type: ignore[assignment]  # uvicorn's type has the names of ASGI alone
            scope[CLIENT_LINK] = self._link
        self._began_s, self._in_head, self._is_new, self._kept_s = time.monotonic(), True, False, None
        self._received_bytes = self._since_body_bytes = self._piece_bytes
        self._head_pieces = self._body_bytes = 0

    def on_headers_complete(self) -> None:
        """Hands the request to the application. Raises ApiError if its head cannot be served."""
        upgrades = self.parser.should_upgrade()
        if upgrades and self.offers_another_protocol:
            return
        self._in_head = False
        version = self.parser.get_http_version()
        if refusal := self._head_refusal(version, opens_websocket=upgrades):
            raise refusal
        before = self.cycle
        super().on_headers_complete()
        if (cycle := self.cycle) is None or cycle is before:
            return
        if not self.pipeline:
            self._running = cycle
        if self.has_direct_writes:
            scope: Scope = self.scope  # type: ignore[assignment]  # as above
            scope[RESPONSE_WRITER] = ResponseWriter(cycle)
        self.headers = []  # Trailers are no headers.
        if version == "1.0":
            cycle.__class__ = _UntilClose  # uvicorn makes cycles of its own class alone
            cycle.waiting_for_100_continue = False

    def on_body(self, body: bytes) -> None:
        """Hands a part of the body to the application."""
        self._body_bytes += len(body)
        self._since_body_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Marks the request as complete, so that its connection is not closed for another one until it is answered."""
        if self.offers_another_protocol:
            return
        self._began_s = None
        if self._peer and not (self.cycle and self.cycle.response_complete):
            self.guard.peers.serve(self, self._peer)
        super().on_message_complete()

    # -- uvicorn

    def on_response_complete(self) -> None:
        """Continues with the next request, without uvicorn's timer for each answer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._running, app = self.pipeline.pop()
            self._start_asgi_task(self._running, app)
            return
        self._pipelined_bytes = 0
        if self._refusal is not None:
            self._end(self._refusal)
            return
        now_s = time.monotonic()
        if self._began_s is not None:
            self._began_s = now_s  # It could not be received while the request before it was answered.
        self._kept_s = now_s
        if self._peer:
            self.guard.peers.wait(self, self._peer)

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection to the WebSocket, under the same guard."""
        if self._is_answering():
            self._refuse(ApiError(400, "a WebSocket begins with no other request before it", code="invalid_upgrade"))
            return
        if self._peer is None:
            return
        peer = self._peer
        try:
            self.guard.peers.upgrade(self, peer)
        except ApiError as error:
            self._refuse(error)
            return
        self._peer = None
        self.connections.discard(self)
        lines = [b"GET %b HTTP/1.1" % self.url, *(b"%b: %b" % header for header in self.headers), b"", b""]
        socket = LimitedWebSocket(self.config, self.server_state, self.app_state, self.guard, peer, self)
        socket.connection_made(self.transport)
        socket.data_received(b"\r\n".join(lines))
        self.transport.set_protocol(socket)

    # -- limits

    def look(self, now_s: float) -> None:
        """Ends the connection if its client has taken too long."""
        limits = self.guard.limits
        if self._write_paused_s is not None and now_s - self._write_paused_s > limits.write_timeout_s:
            self._abort()
        elif self._discards or self.transport.is_closing():
            self._closing_s = now_s if self._closing_s is None else self._closing_s
            if now_s - self._closing_s > LINGER_S:
                self._abort()
        elif self._kept_s is not None and now_s - self._kept_s > self.timeout_keep_alive:
            self.transport.close()
        elif self._began_s is not None and not self._is_answering():
            self._look_at_request(now_s - self._began_s, limits)

    def displace(self) -> None:
        """Closes the connection, which has no request that is being answered: another client needs its place."""
        self._release()
        if self._discards:
            self._abort()
        elif self._is_new or self._began_s is None:
            self.transport.close()
        else:
            self._refuse(ApiError(503, "there are too many connections: try again shortly", code="displaced"))

    def abort_for_memory(self) -> None:
        """Ends the connection, whose client has read nothing for longer than that of any other of its peer's."""
        message = "it did not take what was sent, and memory was needed for other connections"
        self.guard.log.note("slow_reader", peer_of(self._address), message)
        self._abort()

    def _look_at_request(self, waited_s: float, limits: ConnectionLimits) -> None:
        if self._is_new:
            if waited_s > limits.idle_timeout_s:
                self.transport.close()
        elif self._in_head:
            if waited_s > limits.head_timeout_s:
                self._refuse(_too_slow("headers", limits.head_timeout_s, "headers_timeout"))
        elif waited_s > limits.body_timeout_s + self._body_bytes / limits.min_body_rate:
            self._refuse(_too_slow("body", waited_s, "body_timeout"))

    def _check_sizes(self) -> None:
        most = self.guard.limits.max_header_bytes
        if self._in_head:
            if self._received_bytes > most and self._began_s is not None:
                self._refuse(_too_large("headers have", most))
        elif self._began_s is not None and (self._since_body_bytes > 2 * most or len(self.headers) > _MAX_TRAILERS):
            self._refuse(_too_large("chunk extensions or trailers have", most))
        if len(self.pipeline) > MAX_PIPELINED_REQUESTS or self._pipelined_bytes > MAX_PIPELINED_BYTES:
            self._refuse(ApiError(429, "too many requests wait on this connection for the first one's answer: open "
                                  "another", code="too_many_pipelined"))  # fmt: skip

    def _head_refusal(self, version: str, *, opens_websocket: bool) -> ApiError | None:
        """Returns the error of a request that is refused for its head."""
        method = self.parser.get_method()
        if version not in _VERSIONS:
            return ApiError(505, f"HTTP/{version} is not served here: use HTTP/1.1", code="http_version")
        if method == b"CONNECT":
            return ApiError(405, "this server is no proxy: CONNECT is not served", code="method_not_allowed")
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            return ApiError(400, "HTTP/1.0 has no Transfer-Encoding: send Content-Length", code="malformed_request")
        if refusal := self.guard.hosts.refusal(method, self.headers, opens_websocket=opens_websocket):
            return refusal
        return websocket_refusal(method, version, self.headers) if opens_websocket else None

    def _is_answering(self) -> bool:
        """True while an earlier request than the one that is being received has no complete answer."""
        running = self._running
        if running is None or running.response_complete:
            return False
        return self._in_head or self._began_s is None or running is not self.cycle

    def _refuse(self, error: ApiError) -> None:
        """Answers the request that is being received with an error, and ends the connection."""
        if self._refusal is not None or self._discards or self.transport.is_closing():
            return
        if self._is_answering():
            self._refusal = error
            self.flow.resume_reading()  # What comes is dropped, and that the client leaves is seen.
            if self.cycle is not self._running and not self._in_head and self._began_s is not None:
                self._note(error)
                self._abort()  # The application would wait for the rest of a body that is not parsed any more.
            return
        self._end(error)

    def _end(self, error: ApiError) -> None:
        self._note(error)
        running, self._refusal = self._running, error
        if running is not None and running.response_started and not running.response_complete:
            self._abort()
            return
        self._drop_requests()
        body = json.dumps(error.body()).encode()
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "content-type: application/json"]
        head += [f"{name}: {value}" for name, value in error.headers.items()]
        head += [f"content-length: {len(body)}", "connection: close", "", ""]
        self.transport.write("\r\n".join(head).encode() + body)
        # To close while a client sends would reset the connection, and take the answer from it.
        if error.code not in _CLOSES_AT_ONCE and self._received_bytes and self._peer and self.transport.can_write_eof():
            self._discards = True
            self.transport.write_eof()
            self.flow.resume_reading()
            self.guard.peers.wait(self, self._peer)
        else:
            self.transport.close()

    def _note(self, error: ApiError) -> None:
        self.guard.log.note(error.code or str(error.status), peer_of(self._address), error.message)

    def _abort(self) -> None:
        self._drop_requests()
        self.transport.abort()

    def _drop_requests(self) -> None:
        """Stops all writing for requests of this connection, and notifies the application."""
        for cycle in (self._running, self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def _release(self) -> None:
        if self._peer:
            self.guard.peers.release(self, self._peer)
            self._peer = None

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else "local"

    # -- offers of other protocols

    @property
    def offers_another_protocol(self) -> bool:
        """True if the parser takes what follows the headers for something other than HTTP/1.1 or WebSocket."""
        if not self.parser.should_upgrade():
            return False
        offers = [value.lower() for name, value in self.headers if name == b"upgrade"]
        return any(offer != b"websocket" or self.ws_protocol_class is None for offer in offers)

    def parse_without_offer(self, rest: bytes) -> None:
        """Parses the request's head again, which offers nothing now, and what followed it."""
        headers = [(name, value) for name, value in self.headers if name not in _OFFERS]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            headers.append((b"connection", b"close"))
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in headers]
        self._use_new_parser()
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def _use_new_parser(self) -> None:
        self.parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own


class _Flow(FlowControl):
    """uvicorn's flow control, except that it may be called to resume a connection that is closed already."""

    def resume_reading(self) -> None:
        if self.read_paused and not self._transport.is_closing():
            super().resume_reading()


class _UntilClose(RequestResponseCycle):
    """An HTTP/1.0 client's request: a body without a length ends with the connection (RFC 9112, 6.1 and 6.3)."""

    _has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        """Sends what uvicorn sends, without chunks."""
        if message["type"] == "http.response.start":
            headers = [(name.lower(), value) for name, value in message.get("headers", [])]
            self._has_length = any(name == b"content-length" for name, _ in headers)
            if not self._has_length:
                self.chunked_encoding = False
                kept = [header for header in headers if header[0] != b"transfer-encoding"]
                message = {**message, "headers": kept}
        elif message["type"] == "http.response.body" and not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Parser(httptools.HttpRequestParser):
    def __init__(self, connection: LimitedConnection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: "bytes | bytearray | memoryview[int] | array[int]") -> None:
        """Parses `data`. Raises HttpParserUpgrade if the request is a WebSocket handshake."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._connection.offers_another_protocol:
                raise
            self._connection.parse_without_offer(bytes(data)[cast("int", upgrade.args[0]) :])


def _too_slow(what: str, seconds: float, code: str) -> ApiError:
    return ApiError(408, f"the request's {what} did not arrive within {seconds:.0f} s: send faster", code=code)


def _too_large(what: str, most: int) -> ApiError:
    return ApiError(
        431, f"the request's {what} more than {most} bytes: send fewer or shorter", code="headers_too_large"
    )


def _bad_address(address: bytes) -> ApiError:
    if len(address) > _MAX_ADDRESS_BYTES:
        message = f"the request's address has {len(address)} bytes, and at most {_MAX_ADDRESS_BYTES} are read"
        return ApiError(414, f"{message}: send what is long in the body", code="uri_too_long")
    shown = shortened(address.decode("latin-1"))
    return ApiError(400, f"{shown!r} is no address of a request: write a path, such as /v1", code="malformed_request")


def _malformed(error: Exception) -> ApiError:
    return ApiError(400, f"this is no HTTP/1.1 request: {error}"[:200], code="malformed_request")


def limited(
    limits: ConnectionLimits, hosts: AllowedHosts | None = None, *, has_direct_writes: bool = False
) -> type[LimitedConnection]:
    """Makes the class of one server's connections, for uvicorn's `http`."""
    guard = ConnectionGuard(limits, hosts)
    return type("Limited", (LimitedConnection,), {"guard": guard, "has_direct_writes": has_direct_writes})
