"""uvicorn's HTTP connection, which serves requests that offer HTTP/2 as well. Knows no paths.

Java's HTTP client and `curl --http2` offer HTTP/2 ("Upgrade: h2c") with their first request. A server may ignore that
(RFC 9110, 7.8), but the parser stops there and uvicorn drops the body. Here such a request is parsed again without it.
"""

import asyncio
from array import array
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_OFFERS = (b"connection", b"upgrade", b"http2-settings")


class HttpConnection(HttpToolsProtocol):
    """One connection of a client's. Offers of WebSocket are uvicorn's to answer."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._use_new_parser()

    def on_headers_complete(self) -> None:
        """See httptools."""
        if not self.offers_another_protocol:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self.offers_another_protocol:
            super().on_message_complete()

    @property
    def offers_another_protocol(self) -> bool:
        """Whether the parser takes what follows the headers for something else than HTTP/1.1 or WebSocket."""
        if not self.parser.should_upgrade():
            return False
        return any(name == b"upgrade" and value.lower() != b"websocket" for name, value in self.headers)

    def parse_without_offer(self, rest: bytes) -> None:
        """Parse the request's head again, which offers nothing now, and what followed it."""
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


class _Parser(httptools.HttpRequestParser):
    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: "bytes | bytearray | memoryview[int] | array[int]") -> None:
        """See httptools."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._connection.offers_another_protocol:
                raise
            self._connection.parse_without_offer(bytes(data)[cast("int", upgrade.args[0]) :])
