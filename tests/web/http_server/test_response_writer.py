"""Answers written at once are those of uvicorn's own `send`, byte for byte, and leave the connection usable."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn

from mini_infer_gateway.http.asgi import Sender, read_body
from mini_infer_web.asgi import Headers, Receive, Scope, Send
from mini_infer_web.http_server.connection import RESPONSE_WRITER, limited
from mini_infer_web.http_server.limits import ConnectionLimits
from tests.support.running_gateway import until

Answer = tuple[int, Headers, bytes]
JSON = (b"content-type", b"application/json")
ANSWERS: dict[str, Answer] = {
    "/whole": (200, [JSON, (b"content-length", b"4")], b"{  }"),
    "/refused": (429, [JSON, (b"retry-after", b"1"), (b"content-length", b"2")], b"{}"),
    "/unknown-length": (200, [JSON], b"{}"),
    "/last": (200, [(b"content-length", b"2"), (b"connection", b"close")], b"{}"),
    "/nothing": (204, [], b""),
    "/split": (200, [(b"x", b"a\r\n\r\nHTTP/1.1 200 OK"), (b"content-length", b"2")], b"{}"),
}
PIECES = (b"data: 1\n\n", b"data: 22\n\n")


class App:
    """Answers by path, with the writer or without."""

    def __init__(self) -> None:
        self.writes = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, 1 << 20, lambda size: True)
        writer = scope[RESPONSE_WRITER] if self.writes else None
        sender = Sender(send, [(b"x-request-id", b"7")], lambda: False, writer)
        if scope["path"] != "/stream":
            await sender.whole(*ANSWERS[scope["path"]])
            return
        await sender({"type": "http.response.start", "status": 200, "headers": [JSON]})
        for piece in PIECES:
            if not sender.try_chunk(piece):
                await sender({"type": "http.response.body", "body": piece, "more_body": True})
        await sender({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def served() -> AsyncIterator[tuple[App, Callable[[bytes], "asyncio.Future[bytes]"]]]:
    app = App()
    config = uvicorn.Config(
        app,
        port=0,
        http=limited(ConnectionLimits(), has_direct_writes=True),
        lifespan="off",
        log_config=None,
        date_header=False,
    )
    config.server_header = False
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def exchange(sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        got = await reader.read()
        writer.close()
        return got

    try:
        yield app, lambda sent: asyncio.ensure_future(exchange(sent))
    finally:
        server.should_exit = True
        await running


def requests(path: str, method: str = "GET") -> bytes:
    """Two in one piece, of which the second ends the connection."""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n"
    return f"{head}\r\n{head}connection: close\r\n\r\n".encode()


@pytest.mark.parametrize("path", ["/whole", "/refused", "/unknown-length", "/last", "/nothing", "/stream"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_response_writer_writes_the_bytes_of_send(path: str, method: str) -> None:
    async with served() as (app, exchange):
        written = await exchange(requests(path, method))
        app.writes = False
        sent = await exchange(requests(path, method))
    assert written == sent
    assert written.count(b"HTTP/1.1 ") == (1 if path == "/last" else 2)


async def test_a_response_head_with_line_breaks_is_never_written() -> None:
    async with served() as (_, exchange):
        assert await exchange(requests("/split")) == b""
