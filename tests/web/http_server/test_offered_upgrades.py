"""Requests that offer HTTP/2 beside HTTP/1.1, as Java's HTTP client and `curl --http2` send them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from mini_infer_web.asgi import Receive, Scope, Send
from mini_infer_web.http_server.connection import LimitedConnection
from tests.support.running_gateway import until

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
LENGTH = b"POST /there HTTP/1.1\r\nhost: x\r\n" + OFFER + b"x-mine: 1\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"POST /there HTTP/1.1\r\nhost: x\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
BODILESS = b"GET /there HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n"
PLAIN = b"POST /there HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Tells what it was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = sorted(name.decode() for name, _ in scope["headers"])
    content = json.dumps({"path": scope["path"], "body": body.decode(), "headers": names}).encode()
    length = str(len(content)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(echo, port=0, http=LimitedConnection, lifespan="off", log_config=None)  # type: ignore[arg-type]  # ours
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()
    server.should_exit = True
    await serving


async def answer(reader: asyncio.StreamReader) -> dict[str, object]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 200 "), head
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length"))
    answered: dict[str, object] = json.loads(await reader.readexactly(length))
    return answered


@pytest.mark.parametrize(
    ("request_bytes", "body"), [(LENGTH, "hello"), (CHUNKED, "hello"), (BODILESS, ""), (PLAIN, "hello")]
)
async def test_an_h2c_upgrade_is_ignored_wherever_the_request_is_split(request_bytes: bytes, body: str) -> None:
    async with connected() as (reader, writer):
        for cut in {1, 20, request_bytes.index(b"\r\n\r\n") + 4, len(request_bytes) - 2, len(request_bytes)}:
            for piece in filter(None, (request_bytes[:cut], request_bytes[cut:])):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)  # so that the pieces are read apart
            answered = await answer(reader)
            assert (answered["path"], answered["body"]) == ("/there", body), cut
            assert {"upgrade", "http2-settings"}.isdisjoint(answered["headers"])  # type: ignore[arg-type]  # names


async def test_later_requests_on_an_upgraded_connection_are_served() -> None:
    async with connected() as (reader, writer):
        writer.write(LENGTH + PLAIN + CHUNKED)
        answered = [await answer(reader) for _ in range(3)]
        assert [one["body"] for one in answered] == ["hello"] * 3
        assert "x-mine" in answered[0]["headers"]  # type: ignore[operator]  # names


async def test_a_connection_closes_when_the_client_asks_for_it() -> None:
    async with connected() as (reader, writer):
        writer.write(LENGTH.replace(b"connection: Upgrade", b"connection: close, Upgrade"))
        assert (await answer(reader))["body"] == "hello"
        assert await asyncio.wait_for(reader.read(), 10) == b""
