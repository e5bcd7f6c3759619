"""Strangers at the ZMQ ports of engines: without keys, with another service's keys, and speaking plain TCP."""

import asyncio
import contextlib
from random import Random
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from mini_infer_contract.events import sequence_frame
from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_process.curve import secure_client
from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Connects to one socket after the other; whatever a stranger receives is a fault."""
    context = zmq.asyncio.Context()
    try:
        while True:
            address = random.choice(fleet.zmq_addresses)
            if random.random() < 0.3:
                await _tcp(address, random, found)
            else:
                await _zmq(context, address, random, found)
            await fleet.pause(random, 0.3)
    finally:
        context.destroy(linger=0)


async def _zmq(context: zmq.asyncio.Context, address: str, random: Random, found: Findings) -> None:
    kind = random.choice((zmq.SUB, zmq.DEALER, zmq.ROUTER, zmq.PUB))
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    if random.random() < 0.5:
        secure_client(socket, PeerSecret(random.randbytes(32)))
    if kind == zmq.SUB:
        socket.subscribe(b"")
    try:
        socket.connect(address)
        if kind in (zmq.DEALER, zmq.PUB):
            frames = random.choice(
                ([sequence_frame(0)], [b"", sequence_frame(0)], [random.randbytes(50)] * 3, [b"\x00" * 3_000_000])
            )
            with contextlib.suppress(zmq.Again):
                await socket.send_multipart(frames, zmq.NOBLOCK)
        received = await socket.poll(1500, zmq.POLLIN) if kind != zmq.PUB else 0
        found.count("zmq", "received" if received else "nothing")
        if received:
            found.note(f"zmq: {address} sent {str(await socket.recv_multipart())[:200]} to a stranger")
    finally:
        socket.close(linger=0)


async def _tcp(address: str, random: Random, found: Findings) -> None:
    parts = urlsplit(address)
    writer = None
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(
                random.choice((b"\xff" + b"\x00" * 8 + b"\x7f\x03", b"GET / HTTP/1.1\r\n\r\n", random.randbytes(900)))
            )
            await reader.read(1000)
            found.count("zmq", "tcp")
    except (OSError, TimeoutError):
        found.count("zmq", "tcp cut")
    finally:
        if writer is not None:
            writer.transport.abort()
