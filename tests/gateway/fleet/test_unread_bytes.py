"""A message without an end costs the gateway a bounded amount of memory."""

import asyncio
import contextlib
import struct

import psutil
import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.unread_bytes import LIMIT_BYTES
from tests.support.running_gateway import running_gateway, until

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\x00") + b"\x00" + bytes(31)
"""ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), by somebody who speaks it himself: libzmq sends whole messages only."""
READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB"
PART = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)  # a long frame with more behind it


@pytest.mark.parametrize("parts", [PART, PART[:1] + struct.pack(">Q", 0)], ids=["large", "empty"])
async def test_a_zmq_connection_ends_when_a_message_has_no_end(parts: bytes, caplog: pytest.LogCaptureFixture) -> None:
    sent = 0

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        await reader.readexactly(len(GREETING))
        _, length = await reader.readexactly(2)
        await reader.readexactly(length)  # its READY: what comes sooner than that fails the handshake
        burst = parts * max(1, (1 << 18) // len(parts))
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(burst)
                await writer.drain()
                sent += len(burst)
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(publish, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(name="e", url="http://127.0.0.1:1", model="m", events=f"tcp://127.0.0.1:{port}")
    before = psutil.Process().memory_info().rss
    async with running_gateway(endpoint):
        await until(lambda: "UnreadBytesError" in caplog.text)
        assert sent >= LIMIT_BYTES / 2
        assert psutil.Process().memory_info().rss - before < 1 << 30
    server.close()
