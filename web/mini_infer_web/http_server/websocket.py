"""uvicorn's WebSocket under the limits of the HTTP connection that it began as. Knows no messages' meaning."""

import logging
import time
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from mini_infer_web.api_errors import ApiError
from mini_infer_web.http_server.guard import ConnectionGuard
from mini_infer_web.http_server.limits import LINGER_S, MAX_FRAGMENTS
from mini_infer_web.http_server.peers import Connection, Peer

_GOING_AWAY, _POLICY, _TOO_BIG, _TRY_AGAIN = 1001, 1008, 1009, 1013
"""WebSocket's close codes (RFC 6455, 7.4.1, and IANA's registry)."""

log = logging.getLogger(__name__)


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket, which its peer's counts include until it is lost."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        guard: ConnectionGuard,
        peer: Peer,
        counted_as: Connection,
    ) -> None:
        """`counted_as` is the HTTP connection that `peer` counts it as."""
        super().__init__(config, server_state, app_state)
        self._guard, self._peer, self._counted_as = guard, peer, counted_as
        self._began_s = self._active_s = time.monotonic()
        self._write_paused_s: float | None = None
        self._closing_s: float | None = None
        self._is_released = False
        self._unfinished_bytes = 0
        """Bytes of a message that has arrived in part."""
        self._message_began_s = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        """Makes room for another connection."""
        if not self._is_released:
            self._is_released = True
            self._guard.slow_readers.remove(self, self._peer.name)
            self._guard.messages.give_back(self._unfinished_bytes, self._peer.name)
            self._unfinished_bytes = 0
            self._guard.peers.release(self._counted_as, self._peer, is_websocket=True)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received data. A client's fault that uvicorn does not foresee ends this connection alone."""
        if self.transport.is_closing():
            return
        try:
            super().data_received(data)
        except Exception as error:
            self._note("malformed_websocket", f"{type(error).__name__}: {error}"[:200])
            self.transport.abort()
            return
        if self.conn.handshake_exc is not None and not self.transport.is_closing():
            refused = ApiError(400, "the handshake of a WebSocket is malformed", code="invalid_upgrade")
            self._note("invalid_upgrade", str(self.conn.handshake_exc)[:200])
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
                len(refused.message), refused.message.encode()))  # fmt: skip
            self.transport.close()
        elif not self._has_room() and not self.close_sent:
            self._note("too_many_messages", "too many messages arrive at once")
            self._close(_TRY_AGAIN, "too many long messages arrive at once: try again shortly")

    def send_receive_event_to_app(self) -> None:
        """Notes that the client uses the connection."""
        self._active_s = time.monotonic()
        super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        """Notes that the application uses the connection."""
        self._active_s = time.monotonic()
        await super().send(message)

    def handle_cont(self, event: Frame) -> None:
        """Takes one more fragment. A message of endless empty ones would have no size, and take memory."""
        super().handle_cont(event)
        if len(self.frames) > MAX_FRAGMENTS:
            self.frames = []
            self._close(_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} fragments")

    def pause_writing(self) -> None:
        """Reads nothing either, as uvicorn answers pings of a client that does not read."""
        self._write_paused_s = time.monotonic()
        super().pause_writing()
        self._guard.slow_readers.add(self, self._peer.name)
        self._set_reading(not self.read_paused, to=False)

    def resume_writing(self) -> None:
        """Notes that the client reads again."""
        self._write_paused_s = None
        super().resume_writing()
        self._guard.slow_readers.remove(self, self._peer.name)
        self._set_reading(not self.read_paused, to=True)

    def look(self, now_s: float) -> None:
        """Ends the WebSocket if its client has taken too long."""
        limits = self._guard.limits
        if self._write_paused_s is not None and now_s - self._write_paused_s > limits.write_timeout_s:
            self.transport.abort()
        elif self.transport.is_closing() or self.close_sent:
            self._closing_s = now_s if self._closing_s is None else self._closing_s
            if now_s - self._closing_s > LINGER_S:
                self.transport.abort()
        elif not self.handshake_complete:
            if now_s - self._began_s > limits.head_timeout_s:
                self._note("handshake_timeout", f"the handshake took more than {limits.head_timeout_s:.0f} s")
                self.transport.abort()
        elif self._is_too_slow(now_s):
            self._close(_POLICY, "a message did not arrive in time: send faster")
        elif now_s - self._active_s > limits.websocket_idle_timeout_s:
            self._close(_GOING_AWAY, f"no message for {limits.websocket_idle_timeout_s:.0f} s")

    def abort_for_memory(self) -> None:
        """Ends the connection, whose client has read nothing for longer than that of any other of its peer's."""
        self._note("slow_reader", "it did not take what was sent, and memory was needed for other connections")
        self.transport.abort()

    def _has_room(self) -> bool:
        """Counts what has arrived of an unfinished message. Returns False if there is no memory for it."""
        unfinished_bytes = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        more = unfinished_bytes - self._unfinished_bytes
        if more > 0 and not self._guard.messages.take(more, self._peer.name):
            return False
        if more < 0:
            self._guard.messages.give_back(-more, self._peer.name)
        if not self._unfinished_bytes:
            self._message_began_s = time.monotonic()
        self._unfinished_bytes = unfinished_bytes
        return True

    def _is_too_slow(self, now_s: float) -> bool:
        """True if the rest of a message has not arrived in the time of a request's body."""
        if not self._unfinished_bytes or self.read_paused:
            self._message_began_s = now_s
            return False
        limits = self._guard.limits
        return now_s - self._message_began_s > limits.body_timeout_s + self._unfinished_bytes / limits.min_body_rate

    def _close(self, code: int, reason: str) -> None:
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()

    def _set_reading(self, must_change: bool, *, to: bool) -> None:
        if must_change and not self.transport.is_closing():
            (self.transport.resume_reading if to else self.transport.pause_reading)()

    def _note(self, kind: str, message: str) -> None:
        self._guard.log.note(kind, self._peer.name, message)
