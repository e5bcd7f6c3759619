"""Defines the messages of prover and process about one grammar: one document each way, over one socket."""

import socket
import struct

import msgspec

_LENGTH = struct.Struct(">I")


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The result of a worker. Sending it is the worker's last act: a worker that was ended by a limit sends none."""

    fault: str = ""
    """The reason why the grammar cannot be enforced; empty if it can be."""
    num_bytes: int = 0
    """Memory by which the worker grew while it compiled the grammar and computed the first masks."""
    cpu_s: float = 0.0
    """CPU seconds that the proof took."""


class WorkerEnd(msgspec.Struct, frozen=True, tag=True):
    """The end of a worker, as the process that forked it saw it; it only matters if no proof came before."""

    signal: int = 0
    """The signal that ended the worker; 0 if none did."""
    has_timed_out: bool = False
    """True if the parent sent the signal because the worker took longer than `MAX_WALL_S`."""


def send_document(channel: socket.socket, payload: bytes) -> None:
    """Sends `payload` with its length before it. Raises OSError if the other side is gone."""
    channel.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_document(channel: socket.socket) -> bytes:
    """Returns one document. Raises EOFError if the other side left before all of it had arrived."""
    return _receive(channel, _LENGTH.unpack(_receive(channel, _LENGTH.size))[0])


def _receive(channel: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        if not (piece := channel.recv(min(count - len(received), 1 << 20))):
            raise EOFError("the other side has left")
        received += piece
    return bytes(received)
