"""Clients that break the rules of HTTP and WebSocket, with healthy ones beside them."""

import asyncio
import base64
import json
import logging
import struct
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
import uvloop
from websockets.asyncio.client import connect

from mini_infer_web.asgi import Receive, Scope, Send
from mini_infer_web.http_server.connection import LimitedConnection, limited
from mini_infer_web.http_server.hosts import AllowedHosts
from mini_infer_web.http_server.limits import (
    LINGER_S,
    MAX_FRAGMENTS,
    MAX_PIPELINED_REQUESTS,
    UNFINISHED_MESSAGES_BYTES,
    WEBSOCKET_SHARE,
    ConnectionLimits,
)
from mini_infer_web.http_server.server import look_at_all
from tests.support.running_gateway import until
from tests.web.http_server.test_connection import Served, answer, served

LIMITS = ConnectionLimits()
WEBSOCKET = "websockets-sansio"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
KEY = b"sec-websocket-key: " + base64.b64encode(bytes(16)) + b"\r\n"
OFFER = b"host: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
HANDSHAKE = b"GET / HTTP/1.1\r\n" + OFFER + b"sec-websocket-version: 13\r\n" + KEY + b"\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Echoes over WebSocket; over HTTP it tells the path, in pieces below /stream, and waits below /wait."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message.get("text") or ""})
        return
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
    body = json.dumps({"path": scope["path"]}).encode()
    if scope["path"] == "/wait":
        await receive()
        return
    streams = scope["path"] == "/stream"
    headers = [] if streams else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in (body[:3], body[3:]) if streams else (body,):
        await send({"type": "http.response.body", "body": piece, "more_body": streams})
    if streams:
        await send({"type": "http.response.body", "body": b""})


def kinds(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was refused, one word a line of the log."""
    return [record.getMessage().split(" of ")[0] for record in caplog.records if "refusal_log" in record.name]


async def refusal(there: Served, sent: bytes) -> tuple[int, str]:
    """Status and code of the answer to `sent`, after which the connection must end."""
    reader, writer = await there.connect()
    writer.write(sent)
    status, body = await answer(reader)
    assert await reader.read() == b""
    writer.close()
    return status, body["error"]["code"]


def look(there: Served, later_s: float) -> None:
    look_at_all(there.server.server_state, time.monotonic() + later_s)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /x HTTP/1.1\r\n" + OFFER + b"\r\n", 400),
        (b"POST /x HTTP/1.1\r\n" + OFFER + b"sec-websocket-version: 13\r\n" + KEY + b"\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + OFFER + b"\r\n", 426),
        (b"GET /x HTTP/1.1\r\n" + OFFER + b"sec-websocket-version: 8\r\n" + KEY + b"\r\n", 426),
        (b"GET /x HTTP/1.1\r\n" + OFFER + b"sec-websocket-version: 13\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + OFFER + b"sec-websocket-version: 13\r\nsec-websocket-key: x\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + OFFER + b"sec-websocket-version: 13\r\n" + KEY + KEY + b"\r\n", 400),
        (HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
        (HANDSHAKE.replace(b"\r\n\r\n", b"\r\ncontent-length: 5\r\n\r\n"), 400),
        (HANDSHAKE.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n"), 400),
    ],
)
async def test_a_handshake_is_answered_and_closed_when_it_cannot_succeed(sent: bytes, status: int) -> None:
    async with served(app, LIMITS, ws=WEBSOCKET) as there:
        assert await refusal(there, sent) == (status, "invalid_upgrade")
        await until(lambda: not there.connections)


async def test_healthy_clients_are_answered_when_failed_upgrades_flood_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = b"POST /x HTTP/1.1\r\n" + OFFER + b"\r\n"
    async with served(app, replace(LIMITS, max_connections=64), ws=WEBSOCKET) as there:
        streams = []
        for number in range(512):
            reader, writer = await there.connect()
            writer.write(sent)
            streams.append((reader, writer))
            if number % 64 == 0:
                reader, writer = await there.connect()
                writer.write(GET)
                assert (await answer(reader))[0] == 200
                writer.close()
        for reader, writer in streams:
            assert await reader.read(12) in (b"HTTP/1.1 400", b"")
            writer.close()
        await until(lambda: not there.connections)
    assert kinds(caplog).count("invalid_upgrade") == 1
    assert len(kinds(caplog)) <= 3


async def test_websockets_are_limited_to_a_share_of_a_peers_connections() -> None:
    async with served(app, replace(LIMITS, max_connections_per_peer=2 * WEBSOCKET_SHARE), ws=WEBSOCKET) as there:
        open_ones = [await connect(f"ws://127.0.0.1:{there.port}/") for _ in range(2)]
        assert await refusal(there, HANDSHAKE) == (503, "too_many_connections")
        await open_ones[0].close()
        await until(lambda: len(there.connections) == 1)
        async with connect(f"ws://127.0.0.1:{there.port}/") as another:
            await another.send("hello")
            assert await another.recv() == "hello"
        await open_ones[1].close()


async def test_a_websocket_ends_when_it_is_idle() -> None:
    limits = replace(LIMITS, websocket_idle_timeout_s=100)
    async with served(app, limits, ws=WEBSOCKET) as there:
        async with connect(f"ws://127.0.0.1:{there.port}/") as socket:
            await socket.send("hello")
            await socket.recv()
            look(there, 99)
            await socket.send("again")
            assert await socket.recv() == "again"
            look(there, 101)
            await socket.wait_closed()
        assert socket.close_code == 1001


async def test_a_handshake_ends_when_the_application_does_not_answer_it() -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()

    async with served(silent, LIMITS, ws=WEBSOCKET) as there:
        reader, writer = await there.connect()
        writer.write(HANDSHAKE)
        await until(lambda: any(not isinstance(one, LimitedConnection) for one in there.connections))
        look(there, LIMITS.head_timeout_s + 1)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: not there.connections)


async def test_a_websocket_closes_when_it_gets_endless_empty_fragments() -> None:
    async with served(app, LIMITS, ws=WEBSOCKET) as there:
        reader, writer = await there.connect()
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        empty = struct.pack("!BBI", 0, 0x80, 0)
        writer.write(struct.pack("!BBI", 1, 0x80, 0) + empty * (MAX_FRAGMENTS + 1))
        frame = await reader.read()
        assert frame[0] == 0x88
        assert struct.unpack("!H", frame[2:4])[0] == 1009
        writer.close()


async def closed_with(reader: asyncio.StreamReader) -> int:
    """The code of the close frame by which the server ends a WebSocket."""
    async with asyncio.timeout(10):
        frame = await reader.read()
    assert frame[0] == 0x88
    return int(struct.unpack("!H", frame[2:4])[0])


async def begun_message(there: Served, size: int, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a part of a WebSocket's message, and keeps the connection open."""
    reader, writer = await there.connect()
    writer.write(HANDSHAKE)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(struct.pack("!BBQ4s", 0x81, 0xFF, size, bytes(4)) + b"x" * sent)
    await writer.drain()
    return reader, writer


async def test_messages_that_have_arrived_in_part_take_bounded_memory_over_all_websockets() -> None:
    async with served(app, LIMITS, ws=WEBSOCKET) as there:
        first, writer = await begun_message(there, 1 << 20, 900_000)
        guard = there.connections[0]._guard
        await until(lambda: guard.messages.used >= 900_000)
        guard.messages._limit = guard.messages.used + 5_000
        second, _ = await begun_message(there, 1 << 20, 20_000)
        assert await closed_with(second) == 1013
        guard.messages._limit = UNFINISHED_MESSAGES_BYTES
        writer.write(b"x" * ((1 << 20) - 900_000))
        async with asyncio.timeout(10):
            head = await first.readexactly(10)
            assert len(await first.readexactly(struct.unpack("!Q", head[2:])[0])) == 1 << 20
        await until(lambda: guard.messages.used == 0)
        writer.close()


async def test_a_websocket_ends_when_a_message_does_not_arrive_in_time() -> None:
    async with served(app, LIMITS, ws=WEBSOCKET) as there:
        reader, _ = await begun_message(there, 1 << 20, 32_000)
        guard = there.connections[0]._guard
        await until(lambda: guard.messages.used >= 32_000)
        look(there, LIMITS.body_timeout_s)
        assert there.connections
        look(there, LIMITS.body_timeout_s + 3)
        assert await closed_with(reader) == 1008
        await until(lambda: guard.messages.used == 0)


async def test_a_client_reads_the_431_when_it_sends_a_header_of_a_megabyte() -> None:
    async with served(app, LIMITS) as there:
        reader, writer = await there.connect()
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (1 << 20) + b"\r\n\r\n")
        status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (431, "headers_too_large")
        writer.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (b"/" + b"a" * 65_535, (414, "uri_too_long")),
        (b"/?" + b"a" * 65_600, (414, "uri_too_long")),
        (b"http://[", (400, "malformed_request")),
        (b"http://x:99999/", (400, "malformed_request")),
    ],
    ids=["long path", "long query", "bracket", "port"],
)
async def test_an_address_is_refused_by_its_fault_when_it_cannot_be_read(
    address: bytes, expected: tuple[int, str]
) -> None:
    async with served(app, replace(LIMITS, max_header_bytes=1 << 17)) as there:
        reader, writer = await there.connect()
        writer.write(b"GET " + address + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        status, body = await answer(reader)
        assert (status, body["error"]["code"]) == expected
        assert "address" in body["error"]["message"]
        writer.close()


@pytest.mark.parametrize(
    "endless",
    [b"1;" + b"x" * 9000 + b"=", b"0\r\n" + b"x: y\r\n" * 1500, b"0\r\nx: " + b"y" * 9000],
    ids=["chunk extension", "many trailers", "long trailer"],
)
async def test_what_is_no_body_is_bounded_when_it_comes_behind_the_head(endless: bytes) -> None:
    async with served(app, replace(LIMITS, max_header_bytes=4096)) as there:
        sent = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + endless
        assert await refusal(there, sent) == (431, "headers_too_large")


class _Sink(asyncio.Transport):
    """A transport of which nothing is read."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def test_a_heads_cost_is_linear_in_its_length_when_it_comes_byte_by_byte() -> None:
    def cost_s(length: int) -> float:
        config = uvicorn.Config(
            app, http=limited(replace(LIMITS, max_header_bytes=1 << 22)), ws="none", log_config=None
        )
        connection = LimitedConnection.__new__(limited(replace(LIMITS, max_header_bytes=1 << 22)))
        connection.__init__(config, uvicorn.server.ServerState(), {})  # type: ignore[misc]
        connection.connection_made(_Sink())
        connection.data_received(b"GET / HTTP/1.1\r\nx: ")
        began_s = time.process_time()
        for _ in range(length):
            connection.data_received(b"y")
        return time.process_time() - began_s

    cost_s(10_000)
    short, long = min(cost_s(100_000) for _ in range(2)), min(cost_s(400_000) for _ in range(2))
    assert long < 8 * short


async def test_the_oldest_idle_connection_closes_when_a_peer_exceeds_its_limit() -> None:
    async with served(app, replace(LIMITS, max_connections=100, max_connections_per_peer=4)) as there:
        streams = [await there.connect() for _ in range(8)]
        for reader, _ in streams[:4]:
            assert await reader.read() == b""
        streams[-1][1].write(GET)
        assert (await answer(streams[-1][0]))[0] == 200
        assert len(there.connections) <= 4
        for _, writer in streams:
            writer.close()


async def test_answers_come_in_order_when_requests_are_pipelined() -> None:
    async with served(app, LIMITS) as there:
        reader, writer = await there.connect()
        writer.write(b"".join(GET.replace(b"GET /", b"GET /%d" % number) for number in range(20)))
        answered = [(await answer(reader))[1]["path"] for _ in range(20)]
        assert answered == [f"/{number}" for number in range(20)]
        writer.close()


async def test_the_request_before_is_answered_when_the_one_behind_is_malformed() -> None:
    async with served(app, LIMITS) as there:
        reader, writer = await there.connect()
        writer.write(GET + b"garbage\r\n\r\n")
        assert (await answer(reader))[0] == 200
        status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (400, "malformed_request")
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_closes_when_too_many_requests_are_pipelined() -> None:
    async with served(app, LIMITS) as there:
        _, writer = await there.connect()
        writer.write(GET.replace(b"GET /", b"GET /wait") + GET * (MAX_PIPELINED_REQUESTS + 2))
        await until(lambda: any(one._refusal is not None for one in there.connections))
        writer.close()
        await until(lambda: not there.connections)


async def test_an_http_1_0_client_gets_no_chunks_when_the_length_is_unknown() -> None:
    async with served(app, LIMITS) as there:
        reader, writer = await there.connect()
        writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding" not in head.lower()
        assert json.loads(body) == {"path": "/stream"}
        writer.close()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"CONNECT a.example:443 HTTP/1.1\r\nhost: x\r\n\r\n", (405, "method_not_allowed")),
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", (505, "http_version")),
        (b"GET / HTTP/0.9\r\nhost: x\r\n\r\n", (505, "http_version")),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", (400, "malformed_request")),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", (400, "invalid_host")),
        (b"\x16\x03\x01\x02\x00\x01", (400, "malformed_request")),
        (
            b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
            (400, "malformed_request"),
        ),
    ],
)
async def test_a_request_head_is_refused_by_its_fault(sent: bytes, expected: tuple[int, str]) -> None:
    async with served(app, LIMITS) as there:
        assert await refusal(there, sent) == expected


async def test_another_host_is_refused_when_the_server_answers_for_loopback_alone() -> None:
    async with served(app, LIMITS, AllowedHosts(names=("localhost",), undotted=True), WEBSOCKET) as there:
        assert await refusal(there, GET.replace(b"host: x", b"host: evil.example")) == (421, "host_not_allowed")
        cross = b"POST / HTTP/1.1\r\nhost: localhost\r\norigin: https://evil.example\r\ncontent-length: 0\r\n\r\n"
        assert await refusal(there, cross) == (403, "origin_not_allowed")
        socket = HANDSHAKE.replace(b"host: x", b"host: localhost\r\norigin: https://evil.example")
        assert await refusal(there, socket) == (403, "origin_not_allowed")
        reader, writer = await there.connect()
        writer.write(GET.replace(b"host: x", b"host: 127.0.0.1:80"))
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_one_warning_a_minute_and_peer_is_logged_when_requests_are_malformed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(app, LIMITS) as there:
        for _ in range(50):
            await refusal(there, b"garbage\r\n\r\n")
        log: Any = there.server.config.http_protocol_class
        now_s = time.monotonic()
        log.guard.log.look(now_s)
        log.guard.log.look(now_s + 61)
    assert kinds(caplog) == ["malformed_request"] * 2
    assert "49 more" in caplog.text


def test_nothing_is_logged_as_an_error_when_clients_leave_in_the_middle(caplog: pytest.LogCaptureFixture) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"x" * 2000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    bodied = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"

    async def client(there: Served, number: int) -> None:
        _, writer = await there.connect()
        shapes = (GET * 5, GET * 3 + b"garbage\r\n\r\n", bodied + b"zz\r\n", bodied, GET[:-2], GET * 2 + bodied + b"g")
        writer.write(shapes[number % len(shapes)])
        await writer.drain()
        for _ in range(number % 7):
            await asyncio.sleep(0)
        writer.transport.abort() if number % 2 else writer.close()

    async def scenario() -> None:
        async with served(slow, LIMITS) as there:
            for round_number in range(10):
                await asyncio.gather(*(client(there, round_number + number) for number in range(30)))
                look(there, 31)
            look(there, 31)
            look(there, 32 + LINGER_S)
            await until(lambda: not there.connections)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
