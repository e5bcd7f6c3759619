"""The HTTP client against servers that frame, split and break responses in every way that HTTP/1.1 allows."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_gateway.http.upstream import (
    BrokenConnectionError,
    ConnectError,
    MalformedResponseError,
    Response,
    Upstream,
    UpstreamTimeoutError,
    _lone_chunk,
    address_of,
)
from tests.support.running_gateway import until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(*answers: bytes, close: bool = False, split: int = 1 << 20) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives these answers in turn, `split` bytes at a time; yields its URL and the heads it saw."""
    heads: list[bytes] = []
    remaining = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while remaining:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                answer = remaining.pop(0)
                if not answer:
                    break
                for start in range(0, len(answer), split):
                    writer.write(answer[start : start + split])
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", heads
    finally:
        server.close()


@pytest.mark.parametrize("split", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nt: v\r\n\r\n",
            b"hello",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_responses_are_read_and_the_connection_reused_for_each_framing(
    answer: bytes, body: bytes, split: int
) -> None:
    upstream = Upstream(1.0)
    async with serving(answer, answer, split=split) as (url, heads):
        for _ in range(2):
            got = await upstream.fetch(url, "/x", 1.0, [(b"a", b"b")])
            assert got[1] == body
        assert heads[0].startswith(b"GET /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\na: b\r\n" in heads[0]
        upstream.close()


async def test_a_body_ends_with_its_connection_when_it_has_no_length() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\n\r\nhello", close=True) as (url, _):
        assert await Upstream(1.0).fetch(url, "/", 1.0) == (200, b"hello")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n",
    ],
)
async def test_broken_connection_is_raised_when_a_response_is_cut_short(answer: bytes) -> None:
    async with serving(answer, close=True) as (url, _):
        with pytest.raises(BrokenConnectionError):
            await Upstream(1.0).fetch(url, "/", 1.0)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
MALFORMED = [
    b"SSH-2.0-OpenSSH\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nhello",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + OK,
    b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nhi",
    b"HTTP/1.1 204 No Content\r\n\r\nhi",
    b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\nhi",
    b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + OK,
    b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000 + b"\r\nContent-Length: 2\r\n\r\nhi",
    b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: a\r\n" % number for number in range(20_000)),
    b"HTTP/1.1 200 OK\r\nx: a\x01b\r\nContent-Length: 2\r\n\r\nhi",
    OK + OK,
    OK + b"and more",
]


@pytest.mark.parametrize("answer", MALFORMED, ids=range(len(MALFORMED)))
async def test_a_connection_is_not_reused_when_its_response_is_malformed(answer: bytes) -> None:
    async with serving(answer, OK) as (url, heads):
        upstream = Upstream(1.0)
        with pytest.raises(MalformedResponseError):
            await upstream.fetch(url, "/", 1.0)
        assert await upstream.fetch(url, "/", 1.0) == (200, b"hi")
        assert len(heads) == 2
        upstream.close()


async def test_an_idle_connection_is_closed_when_bytes_arrive_on_it() -> None:
    reported = asyncio.Event()
    accepted = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        if accepted == 1:
            await reported.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstream = Upstream(1.0)
    assert await upstream.fetch(url, "/", 1.0) == (200, b"hi")
    reported.set()
    await until(lambda: not upstream._idle)
    assert await upstream.fetch(url, "/", 1.0) == (200, b"hi")
    assert accepted == 2
    upstream.close()
    server.close()


@pytest.mark.parametrize("url", ["http://h:99999", "http://[::1", "http://h:x", "http://", "ftp://h:1", "nonsense"])
async def test_connect_error_is_raised_when_the_url_is_no_address(url: str) -> None:
    with pytest.raises(ConnectError, match="is no address"):
        await Upstream(1.0).fetch(url, "/", 1.0)


async def test_timeout_is_raised_when_an_endpoint_is_silent_and_connect_error_when_its_port_is_closed() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", b"never asked for") as (url, _):
        with pytest.raises(UpstreamTimeoutError):
            await Upstream(1.0).fetch(url, "/", 0.05)
    await asyncio.sleep(0)
    with pytest.raises(ConnectError):
        await Upstream(1.0).fetch(url, "/", 1.0)


async def test_connections_use_tcp_keepalive_so_that_a_lost_host_is_noticed() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi") as (url, _):
        response = await Upstream(1.0).request(url, "GET", b"/", [], b"", 1.0)
        assert response._transport is not None
        connection = response._transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        response.cut()


async def test_reading_stops_when_a_response_body_is_not_consumed() -> None:
    size = 20_000_000
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    async with serving(answer, split=100_000) as (url, _):
        response = await Upstream(1.0).request(url, "GET", b"/", [], b"", 1.0)
        await asyncio.sleep(0.1)
        assert 0 < response.buffered_bytes < 1_000_000
        read = 0
        while piece := await response.read(1.0):
            read += len(piece)
        assert read == size
        response.close()


async def test_a_request_is_repeated_on_a_new_connection_when_the_idle_one_was_closed() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    async with serving(answer, b"", answer) as (url, heads):
        upstream = Upstream(1.0)
        for _ in range(2):
            assert await upstream.fetch(url, "/", 1.0) == (200, b"hi")
        assert len(heads) == 3
        upstream.close()


@pytest.mark.parametrize("seed", range(4))
async def test_chunked_bodies_are_decoded_for_every_split_of_their_bytes(seed: int) -> None:
    """Lone chunks pass by the parser, which must be between two chunks then: so all that looks alike is mixed here."""
    dice = Random(seed)
    bodies = [b"5\r\nhello\r\n", b"a", b"0\r\n\r\n", b"x" * 300, b"\r\n", b"3\r\nab\r\n"]
    expected = [dice.choice(bodies) for _ in range(200)]
    sizes = dice.choices([b"%x", b"%X", b"0%x", b"%x;name=value"], weights=(8, 1, 1, 1), k=200)
    chunks = [(size + b"\r\n%b\r\n") % (len(body), body) for size, body in zip(sizes, expected, strict=True)]
    response = Response(Upstream(1.0), address_of("http://x"))
    response.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    got: list[bytes] = []
    pump = asyncio.create_task(response.pump(lambda piece: not got.append(piece), 5.0))
    await asyncio.sleep(0)
    for chunk in chunks:
        cuts = sorted(dice.sample(range(1, len(chunk)), dice.choice((0, 0, 0, 1, 2))))
        for start, stop in pairwise([0, *cuts, len(chunk)]):
            response.data_received(chunk[start:stop])
    assert not pump.done()
    response.data_received(b"0\r\n\r\n")
    assert await pump is False
    assert b"".join(got) == b"".join(expected)


@given(st.binary(min_size=1, max_size=5000), st.binary(max_size=3))
def test_a_lone_chunk_is_recognised_when_a_piece_holds_exactly_one(body: bytes, more: bytes) -> None:
    """Of each length, also where the size has one digit more than that of the chunk one byte shorter."""
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    assert _lone_chunk(chunk) == body
    for other in (chunk + more, chunk[:-1], chunk[1:], b"0" + chunk, chunk + b"0\r\n\r\n", b"0\r\n\r\n", b""):
        assert other == chunk or _lone_chunk(other) == b""


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 4095, 4096, 65535, 65536, 1 << 20])
def test_a_lone_chunk_is_recognised_for_each_length(size: int) -> None:
    assert _lone_chunk(b"%x\r\n%b\r\n" % (size, b"x" * size)) == b"x" * size
    assert _lone_chunk(b"%x\r\n%b\r\n" % (size + 1, b"x" * size)) == b""
