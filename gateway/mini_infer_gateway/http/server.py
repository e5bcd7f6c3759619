"""Extends uvicorn's server with a shutdown that loses no request: it announces its end, then stops listening.

For `drain_s` from the first SIGTERM it still accepts connections, while the application answers `/readyz` with 503 and
adds `connection: close` to every response. Clients and proxies therefore leave persistent connections after a response,
not in the middle of a request. A second signal, or Ctrl-C, skips the drain. This module does not know what is served.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from mini_infer_web.http_server.server import LimitedServer
from mini_infer_web.http_server.websocket import LimitedWebSocket
from mini_infer_web.tls import ServerTls

KEEP_ALIVE_S = 120
"""Seconds that an idle connection stays open: longer than clients and proxies keep one (httpx 5 s, aiohttp 15, nginx
and ALB 60, Go 90). If the server closed first, a request that is sent at that moment would be lost.
"""
QUIET_S = 1.0
"""Seconds without a connection after which a drain ends early."""
TICK_S = 0.05


class DrainingServer(LimitedServer):
    """A uvicorn server that drains before it exits. It calls `on_drain` once, on the event loop, as the drain
    begins.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain_s: float,
        on_drain: Callable[[], None],
        tls: ServerTls | None = None,
    ) -> None:
        """`tls` is for the first socket; all others use plain HTTP."""
        config.timeout_keep_alive = KEEP_ALIVE_S
        super().__init__(config, tls)
        self._drain_s, self._on_drain = drain_s, on_drain
        self._drain_ends_s = self._connected_s = 0.0
        self.draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the drain at the first SIGTERM, and leaves every other signal to uvicorn."""
        if sig == signal.SIGTERM and self.started and not self.draining:
            self.begin_drain()
        else:
            super().handle_exit(sig, frame)

    def begin_drain(self) -> None:
        """Begins the drain, as SIGTERM does; the next tick does the rest, since this may run in a signal handler."""
        self.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Requests the exit when the drain is over. uvicorn calls it ten times a second."""
        if self.draining:
            self.should_exit |= self._has_drained(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, then waits for first requests on new connections and for WebSockets, before the shutdown."""
        if self.draining and not self.force_exit:
            for server in self.servers:
                server.close()
            # Who was accepted last may still be sending its first request.
            await _wait_while(lambda: bool(self.server_state.connections), QUIET_S)
            # uvicorn cuts WebSockets at once; the application ends them when they have been answered.
            await _wait_while(self._has_websockets, self.config.timeout_graceful_shutdown or 0)
        await super().shutdown(sockets)

    def _has_websockets(self) -> bool:
        return any(isinstance(one, LimitedWebSocket) for one in self.server_state.connections)

    def _has_drained(self, now_s: float) -> bool:
        if not self._drain_ends_s:
            self._drain_ends_s, self._connected_s = now_s + self._drain_s, now_s
            self._on_drain()
        if self.server_state.connections:
            self._connected_s = now_s
        return now_s >= min(self._drain_ends_s, self._connected_s + QUIET_S)


async def _wait_while(condition: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while condition() and time.monotonic() < deadline_s:  # noqa: ASYNC110 -- uvicorn has no event
        await asyncio.sleep(TICK_S)
