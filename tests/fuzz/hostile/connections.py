"""Connections that are not used as HTTP wants: upgrades, slow and endless heads, bytes of other protocols."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from random import Random
from urllib.parse import urlsplit

from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings

Kind = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Random, float], Coroutine[None, None, None]]
"""What is done with an open connection, for some seconds."""

_UPGRADE = (
    b"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: {to}\r\n"
    b"Sec-WebSocket-Version: {version}\r\n{key}\r\n"
)
_OTHER_PROTOCOLS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"\r\n" * 5000,
    b"",
)


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Opens bursts of odd connections, holds them for some seconds, and lets go."""
    while True:
        url = fleet.gateway_url if random.random() < 0.6 else random.choice(fleet.engine_urls)
        address = urlsplit(url)
        kind = random.choice((_upgrade, _slow_head, _endless_head, _other_protocol, _silent, _garbage_websocket))
        burst = random.choice((1, 4, 40))
        duration_s = random.uniform(0.1, 8.0)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(burst):
                tasks.create_task(_one(kind, address.hostname or "", address.port or 80, random, duration_s, found))
        await fleet.pause(random, 0.5)


async def _one(kind: Kind, host: str, port: int, random: Random, duration_s: float, found: Findings) -> None:
    name = kind.__name__.strip("_")
    writer = None
    try:
        async with asyncio.timeout(duration_s + 5):
            reader, writer = await asyncio.open_connection(host, port)
            await kind(reader, writer, random, duration_s)
            found.count("connections", name)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        found.count("connections", f"{name} cut")
    finally:
        if writer is not None:
            writer.transport.abort()


async def _upgrade(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, random: Random, duration_s: float
) -> None:
    path = random.choice((b"/x", b"/v1/responses", b"/v1/chat/completions", b"/"))
    key = random.choice((b"", b"Sec-WebSocket-Key: x\r\n", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"))
    wire = _UPGRADE.replace(b"{method}", random.choice((b"GET", b"POST"))).replace(b"{path}", path)
    wire = wire.replace(b"{to}", random.choice((b"websocket", b"h2c", b"odd"))).replace(b"{key}", key)
    writer.write(wire.replace(b"{version}", random.choice((b"13", b"8", b"x"))))
    await _read_for(reader, duration_s)


async def _garbage_websocket(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, random: Random, duration_s: float
) -> None:
    wire = _UPGRADE.replace(b"{method}", b"GET").replace(b"{path}", b"/v1/responses").replace(b"{to}", b"websocket")
    writer.write(
        wire.replace(b"{version}", b"13").replace(b"{key}", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n")
    )
    await writer.drain()
    for _ in range(random.randint(1, 10)):
        writer.write(random.randbytes(random.choice((1, 20, 70_000))))
        await writer.drain()
    await _read_for(reader, duration_s)


async def _slow_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, random: Random, duration_s: float
) -> None:
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
    await _read_for(reader, duration_s)


async def _endless_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, random: Random, duration_s: float
) -> None:
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
    for _ in range(60):
        writer.write(b"a" * 50_000)
        await writer.drain()
    await _read_for(reader, duration_s)


async def _other_protocol(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, random: Random, duration_s: float
) -> None:
    writer.write(random.choice(_OTHER_PROTOCOLS))
    await _read_for(reader, duration_s)


async def _silent(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, random: Random, duration_s: float
) -> None:
    await _read_for(reader, duration_s)


async def _read_for(reader: asyncio.StreamReader, duration_s: float) -> None:
    """Reads what comes until the other side closes or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            while await reader.read(1 << 16):
                pass
