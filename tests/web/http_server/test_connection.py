"""Clients that send too much, too slowly or not at all, and clients that do not read."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from mini_infer_gateway.http.asgi import client_disconnected, read_body, send_json
from mini_infer_web.asgi import Application, Receive, Scope, Send
from mini_infer_web.http_server.client_link import CLIENT_LINK, ClientLink
from mini_infer_web.http_server.connection import LimitedConnection, limited
from mini_infer_web.http_server.hosts import AllowedHosts
from mini_infer_web.http_server.limits import ConnectionLimits
from tests.support.running_gateway import until

LIMITS = ConnectionLimits(max_connections=3, max_header_bytes=4096, body_timeout_s=30, min_body_rate=1000)
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


class Echo:
    """Says how long the body was, or never stops to answer."""

    def __init__(self) -> None:
        self.num_lost = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, 1 << 20, lambda size: True)
            if scope["path"] == "/endless":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                watch = asyncio.create_task(client_disconnected(receive))
                while not watch.done():
                    await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                    await asyncio.sleep(0)
                self.num_lost += 1
                return
            await send_json(send, 200, {"length": len(body)})
        except Exception:
            self.num_lost += 1


class Served:
    def __init__(self, server: uvicorn.Server, app: Echo, port: int) -> None:
        self.server, self.app, self.port = server, app, port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    @property
    def connections(self) -> list[Any]:
        return list(self.server.server_state.connections)

    def look(self, later_s: float) -> None:
        """As it will be done in so many seconds."""
        for connection in self.connections:
            assert isinstance(connection, LimitedConnection)
            connection.look(time.monotonic() + later_s)


@asynccontextmanager
async def served(
    application: Application | None = None,
    limits: ConnectionLimits = LIMITS,
    hosts: AllowedHosts | None = None,
    ws: Any = "none",
) -> AsyncIterator[Served]:
    app = Echo()
    http = limited(limits, hosts, has_direct_writes=True)
    config = uvicorn.Config(application or app, port=0, http=http, ws=ws, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    await until(lambda: server.started)
    try:
        yield Served(server, app, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        await task


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head[9:12]), json.loads(await reader.readexactly(length))


async def test_a_request_after_another_is_served() -> None:
    async with served() as there:
        reader, writer = await there.connect()
        for length in (0, 3000):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % length + b"x" * length)
            assert await answer(reader) == (200, {"length": length})
            there.look(4)
        there.look(6)  # uvicorn keeps a connection for five seconds unless it is told otherwise
        assert await reader.read() == b""
        writer.close()


async def test_endless_headers_end_at_the_limit() -> None:
    async with served() as there:
        reader, writer = await there.connect()
        writer.write(HEAD)
        for number in range(5):
            writer.write(b"x-%d: %s\r\n" % (number, b"y" * 1000))
            await writer.drain()
        status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (431, "headers_too_large")
        writer.close()


@pytest.mark.parametrize(
    ("sent", "later_s", "status"),
    [
        (b"", 29, None),
        (b"", 31, 0),
        (HEAD, 19, None),
        (HEAD, 21, 408),
        (HEAD + b"content-length: 9000\r\n\r\nxx", 29, None),
        (HEAD + b"content-length: 9000\r\n\r\nxx", 31, 408),
        (HEAD + b"content-length: 90000\r\n\r\n" + b"x" * 60_000, 80, None),
        (HEAD + b"content-length: 90000\r\n\r\n" + b"x" * 60_000, 95, 408),
    ],
)
async def test_connections_close_when_clients_are_slow(sent: bytes, later_s: float, status: int | None) -> None:
    async with served() as there:
        reader, writer = await there.connect()
        writer.write(sent)
        await until(lambda: bool(there.connections))
        if sent:
            await until(lambda: sum(connection._received_bytes for connection in there.connections) == len(sent))
        there.look(later_s)
        if status is None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.05)
        elif status == 408:
            answered, body = await answer(reader)
            what = "body" if b"\r\n\r\n" in sent else "headers"
            assert (answered, body["error"]["code"]) == (408, f"{what}_timeout")
        if status is not None:
            assert await reader.read() == b""
            await until(lambda: not there.connections)
        writer.close()


async def test_a_connection_closes_when_its_client_does_not_read() -> None:
    async with served() as there:
        _, writer = await there.connect()
        writer.write(HEAD.replace(b"POST / ", b"POST /endless ") + b"\r\n")
        await until(lambda: any(connection._write_paused_s is not None for connection in there.connections))
        there.look(59)
        assert there.app.num_lost == 0
        there.look(61)
        await until(lambda: there.app.num_lost == 1)
        writer.close()


async def test_the_longest_waiting_connection_is_closed_when_there_are_as_many_as_may_be() -> None:
    async with served() as there:
        streams = [await there.connect()]
        await until(lambda: len(there.connections) == 1)
        streams += [await there.connect() for _ in range(2)]
        await until(lambda: len(there.connections) == 3)
        reader, writer = await there.connect()
        writer.write(HEAD + b"content-length: 1\r\n\r\nx")
        assert await answer(reader) == (200, {"length": 1})
        assert await streams[0][0].read() == b""
        for _, one in [*streams, (reader, writer)]:
            one.close()


async def test_a_connection_is_refused_when_all_others_have_requests() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await client_disconnected(receive)

    async with served(app) as there:
        streams = [await there.connect() for _ in range(3)]
        for _, writer in streams:
            writer.write(HEAD + b"content-length: 1\r\n\r\nx")
        await until(lambda: sum(one._running is not None and one._began_s is None for one in there.connections) == 3)
        reader, writer = await there.connect()
        status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        for _, one in [*streams, (reader, writer)]:
            one.close()


async def test_a_request_is_notified_when_its_connection_is_lost_after_its_buffer_was_full() -> None:
    answered = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, 1 << 20, lambda size: True)
        scope[CLIENT_LINK].watch(answered.set)
        await answered.wait()

    async with served(app) as server:
        _, writer = await server.connect()
        writer.write(HEAD + b"content-length: 300000\r\n\r\n" + b"x" * 300_000)
        await writer.drain()
        writer.close()
        await asyncio.wait_for(answered.wait(), 5)


def test_a_watcher_is_notified_at_once_when_the_connection_is_already_lost() -> None:
    link, answered = ClientLink(lambda: None), list[str]()
    link.lose()
    link.watch(lambda: answered.append("late"))
    assert answered == ["late"]


def test_a_request_is_not_notified_when_it_is_over() -> None:
    link, answered = ClientLink(lambda: None), list[str]()
    link.watch(lambda: answered.append("over"))
    link.unwatch()
    link.lose()
    assert answered == []
