"""Ends a connection whose peer sends a message without an end: libzmq bounds the size of frames, not their number.

The kernel counts what has arrived (`tcp_info`, tcp(7)), the reader what it got as whole messages; the difference is
what libzmq buffers. Elsewhere than on Linux nothing is counted, and nothing is ended.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence

import zmq.asyncio

LIMIT_BYTES = 32 << 20
"""More than a burst of a healthy engine, whose batches are of some kilobytes."""
LOOK_S = 0.1
_FRAME_BYTES = 64
"""What a frame has beside its bytes, at most: its length, and CurveZMQ's nonce and authenticator."""
_RECEIVED = slice(128, 136)
"""Of `struct tcp_info`: tcpi_bytes_received, since Linux 4.1."""


class UnreadBytesError(Exception):
    """The peer sends more than anybody has read as messages."""


class UnreadBytes:
    """The account of one connection."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: libzmq's own, which it may close at any time."""
        self._descriptor = descriptor
        self._read = 0

    def took(self, frames: Sequence[bytes]) -> None:
        """Counts a message that was read."""
        self._read += sum(map(len, frames)) + len(frames) * _FRAME_BYTES

    async def watch(self) -> None:
        """Looks at the connection until cancelled. Raises UnreadBytesError once too much is unread."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._check()

    async def receive(self, socket: zmq.asyncio.Socket) -> list[bytes]:
        """Returns the next message, and looks while it waits. Raises UnreadBytesError once too much is unread."""
        while not await socket.poll(int(LOOK_S * 1000)):
            self._check()
        frames: list[bytes] = await socket.recv_multipart()
        self.took(frames)
        return frames

    def _check(self) -> None:
        if (unread := _received(self._descriptor) - self._read) > LIMIT_BYTES:
            raise UnreadBytesError(f"{unread >> 20} MiB have come that are no whole messages")


def _received(descriptor: int) -> int:
    """Returns how many bytes have come over a connection, or 0 if nobody can tell."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
        return int.from_bytes(info[_RECEIVED], sys.byteorder)
    return 0
