"""uvicorn's server with our connections: sockets that are passed in, TLS for the first, and a look at slow clients.

Does not know what is served.
"""

import asyncio
import socket
import sys
import time
from typing import Any

import uvicorn

from mini_infer_web.http_server.connection import LimitedConnection
from mini_infer_web.http_server.websocket import LimitedWebSocket
from mini_infer_web.tls import LOOK_EVERY_S, ServerTls

TICKS_PER_S = 10
"""Ticks of uvicorn's main loop in a second."""
_OTHER_OPEN_FILES = 64
"""Files that a server has open beside connections: standard streams, sockets of events, modules and tokenizers that are
being read.
"""


def server_config(app: Any, http: type[LimitedConnection], max_message_bytes: int, **others: Any) -> uvicorn.Config:
    """Returns the settings that all our servers share. WebSocket messages are small: compressing each
    is not worth it.
    """
    return uvicorn.Config(
        app,
        http=http,
        ws="websockets-sansio",
        ws_max_size=max_message_bytes,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        **others,
    )


def connections_for(open_files: int, desired: int) -> int:
    """Returns how many clients' connections a limit of open files allows: each may need one to an engine, too."""
    return max(1, min(desired, (open_files - _OTHER_OPEN_FILES) // 2))


class LimitedServer(uvicorn.Server):
    """Serves sockets that are bound already."""

    def __init__(self, config: uvicorn.Config, tls: ServerTls | None = None) -> None:
        """`tls` is that of the first socket; all others speak plain HTTP."""
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the sockets. uvicorn's own method would use TLS for all of them, and give each
        handshake a minute.
        """
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(3)  # as uvicorn
        loop = asyncio.get_running_loop()
        http: Any = self.config.http_protocol_class
        self.servers = []
        for index, listening in enumerate(sockets or []):
            context = self._tls.context if self._tls and index == 0 else None
            timeout_s = http.guard.limits.head_timeout_s if context else None
            self.servers.append(
                await loop.create_server(
                    self._connection,
                    sock=listening,
                    ssl=context,
                    ssl_handshake_timeout=timeout_s,
                    ssl_shutdown_timeout=timeout_s,
                    backlog=self.config.backlog,
                )
            )
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        http: Any = self.config.http_protocol_class
        made: asyncio.Protocol = http(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    async def on_tick(self, counter: int) -> bool:
        """Looks at connections once a second, and at certificates from time to time."""
        if counter % TICKS_PER_S == 0:
            look_at_all(self.server_state, time.monotonic())
            http: Any = self.config.http_protocol_class
            http.guard.log.look(time.monotonic())
        if self._tls and counter % int(LOOK_EVERY_S * TICKS_PER_S) == 0:
            self._tls.look()
        return await super().on_tick(counter)


def look_at_all(state: uvicorn.server.ServerState, now_s: float) -> None:
    """Ends the connections whose clients have taken too long; to be called about once a second."""
    for connection in list(state.connections):
        if isinstance(connection, LimitedConnection | LimitedWebSocket):
            connection.look(now_s)
