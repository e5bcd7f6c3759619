"""The relay of a stream, over a real connection: nothing is lost, doubled or reordered, whoever is slow."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest

from mini_infer_gateway.http.asgi import Sender
from mini_infer_gateway.http.sse import EventSplitter
from mini_infer_gateway.http.upstream import (
    BrokenConnectionError,
    Response,
    Upstream,
    UpstreamError,
    UpstreamTimeoutError,
)
from mini_infer_gateway.pipeline.stages.relay import Relay
from mini_infer_web.asgi import Message, Send
from mini_infer_web.http_server.response_writer import ResponseWriter

EVENTS = [b"data: %d %s\n\n" % (number, b"x" * (number * 37 % 300)) for number in range(400)]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Client:
    """What ASGI's `send` is: it waits before it writes while its connection is full, as uvicorn's does."""

    def __init__(self, is_full: Callable[[], bool] = lambda: False) -> None:
        self._is_full = is_full
        self.got: list[bytes] = []
        self.waits = 0

    def take(self, body: bytes) -> bool:
        """What a writer does: nothing where it would have to wait."""
        if self._is_full():
            self.waits += 1
            return False
        self.got.append(body)
        return True

    async def send(self, message: Message) -> None:
        if self._is_full():
            self.waits += 1
            await asyncio.sleep(0.002)
        self.got.append(message.get("body", b""))

    def sender(self) -> Sender:
        sender = Sender(self.send, [], lambda: False, Writer(self))
        sender.status = 200
        return sender


class Writer(ResponseWriter):
    """A client's."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def chunk(self, body: bytes) -> bool:
        return self._client.take(body)


@asynccontextmanager
async def streaming(
    write: Callable[[asyncio.StreamWriter], "asyncio.Future[None] | object"],
) -> AsyncIterator[Response]:
    """The response of a server whose body `write` sends, its head read."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD)
            await write(writer)  # type: ignore[misc]  # tests give coroutines
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    upstream = Upstream(1.0)
    response = await upstream.request(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "GET", b"/", [], b"", 5.0
    )
    try:
        yield response
    finally:
        response.close()
        upstream.close()
        server.close()


def in_pieces(seed: int, end: bytes = b"0\r\n\r\n") -> Callable[[asyncio.StreamWriter], object]:
    """All events as chunks of HTTP, cut and paused anywhere."""
    stream = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS) + end

    async def write(writer: asyncio.StreamWriter) -> None:
        dice, position = Random(seed), 0
        while position < len(stream):
            size = dice.choice((1, 7, 300, 5_000))
            writer.write(stream[position : position + size])
            position += size
            await asyncio.sleep(0)

    return write


def everything(piece: bytes) -> tuple[bytes, bool]:
    return piece, False


async def relay(send: Send, response: Response, timeout_s: float = 5.0) -> None:
    splitter = EventSplitter()
    await Relay(send, splitter, everything, lambda: None).run(response, b"", timeout_s)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("full", [0.0, 0.3, 1.0])
async def test_relay_sends_every_event_once_and_in_order(seed: int, full: float) -> None:
    dice = Random(seed)
    client = Client(lambda: dice.random() < full)
    async with streaming(in_pieces(seed)) as response:
        await relay(client.sender(), response)
    assert b"".join(client.got) == b"".join(EVENTS)
    assert all(piece.endswith(b"\n\n") for piece in client.got[:-1])
    assert (client.waits > 0) == (full > 0)


async def test_relay_awaits_a_send_when_it_is_no_response_writer() -> None:
    client = Client()
    async with streaming(in_pieces(1)) as response:
        await relay(client.send, response)
    assert b"".join(client.got) == b"".join(EVENTS)


async def test_relay_wakes_no_task_when_the_client_keeps_up() -> None:
    """One look at the connection's waiter: events come while the relay sleeps, and it sleeps on."""
    client, waiters = Client(), set()

    async def write(writer: asyncio.StreamWriter) -> None:
        for event in EVENTS[:50]:
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            before = len(client.got)
            while len(client.got) == before:  # noqa: ASYNC110 -- what is waited for is what is tested
                await asyncio.sleep(0.001)
            waiters.add(id(response._waiter))
        writer.write(b"0\r\n\r\n")

    async with streaming(write) as response:
        await relay(client.sender(), response)
    assert len(client.got) == 51
    assert len(waiters) == 1


async def test_relay_ends_after_the_last_event_when_an_engine_reports_its_death() -> None:
    def read(piece: bytes) -> tuple[bytes, bool]:
        before, ended, _ = piece.partition(b"data: 10 ")
        return before, bool(ended)

    for full in (False, True):
        client = Client(lambda: full)  # noqa: B023 -- it is called within the turn
        async with streaming(in_pieces(2)) as response:
            with pytest.raises(BrokenConnectionError, match="its engine has ended"):
                await Relay(client.sender(), EventSplitter(), read, lambda: None).run(response, b"", 5.0)
        assert b"".join(client.got) == b"".join(EVENTS[:10])


async def test_relay_has_sent_whole_events_only_when_a_stream_breaks_off() -> None:
    client = Client()
    async with streaming(in_pieces(3, end=b"64\r\ndata: half of an event")) as response:
        with pytest.raises(UpstreamError):
            await relay(client.sender(), response)
    assert b"".join(client.got) == b"".join(EVENTS)


async def test_relay_timeout_counts_from_the_last_byte() -> None:
    client = Client()

    async def write(writer: asyncio.StreamWriter) -> None:
        for event in EVENTS[:6]:
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await asyncio.sleep(0.05)
        await asyncio.sleep(60)

    async with streaming(write) as response:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(UpstreamTimeoutError):
            await relay(client.sender(), response, timeout_s=1.0)  # twenty times the pause of the server
        assert asyncio.get_running_loop().time() - began_s > 1.2
    assert b"".join(client.got) == b"".join(EVENTS[:6])


async def test_relay_raises_when_reading_events_fails() -> None:
    def read(piece: bytes) -> tuple[bytes, bool]:
        raise LookupError("a mistake")

    async with streaming(in_pieces(1)) as response:
        with pytest.raises(LookupError):
            await Relay(Client().sender(), EventSplitter(), read, lambda: None).run(response, b"", 5.0)
