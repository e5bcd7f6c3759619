"""Ends a connection whose peer sends an endless message: libzmq bounds the size of frames, not their number.

The kernel counts the bytes that have arrived (`tcp_info`, tcp(7)), and the reader those of whole messages; the
difference is what libzmq buffers. On systems other than Linux nothing is counted, and no connection is ended.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence

import zmq.asyncio

LIMIT_BYTES = 32 << 20
"""Largest number of unread bytes: more than a burst of a healthy engine, whose batches have some kilobytes."""
LOOK_S = 0.1
_FRAME_BYTES = 64
"""Largest overhead of a frame: its length, and CurveZMQ's nonce and authenticator."""
_RECEIVED = slice(128, 136)
"""Position of `tcpi_bytes_received` in `struct tcp_info`, since Linux 4.1."""


class UnreadBytesError(Exception):
    """The peer has sent more bytes that form no whole messages than the limit."""


class UnreadBytes:
    """The count of unread bytes of one connection."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` belongs to libzmq, which may close it at any time."""
        self._descriptor = descriptor
        self._read = 0

    def took(self, frames: Sequence[bytes]) -> None:
        """Counts a message that was read."""
        self._read += sum(map(len, frames)) + len(frames) * _FRAME_BYTES

    async def watch(self) -> None:
        """Checks the connection until cancelled. Raises UnreadBytesError once too much is unread."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._check()

    async def receive(self, socket: zmq.asyncio.Socket) -> list[bytes]:
        """Returns the next message, and checks meanwhile. Raises UnreadBytesError once too much is unread."""
        while not await socket.poll(int(LOOK_S * 1000)):
            self._check()
        frames: list[bytes] = await socket.recv_multipart()
        self.took(frames)
        return frames

    def _check(self) -> None:
        if (unread := _received(self._descriptor) - self._read) > LIMIT_BYTES:
            raise UnreadBytesError(f"{unread >> 20} MiB have come that are no whole messages")


def _received(descriptor: int) -> int:
    """Returns the number of bytes that have arrived over a connection, or 0 if it cannot be determined."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
        return int.from_bytes(info[_RECEIVED], sys.byteorder)
    return 0
