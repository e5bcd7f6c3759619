"""Tells the first rank what other ranks have found changed in pages and states that came back from main memory.

Each rank keeps its own part of a page, and proves it. A pass's results are void for a sequence of which any part has
changed. There is one message of each rank for each pass that brings something back, in the order of passes.
"""

from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.distributed.rank_socket import report_socket

_LOOK_MS = 100
"""Milliseconds between two checks that the group still runs, while waiting for a rank."""


class Proof(msgspec.Struct, frozen=True):
    """A report of one rank on one pass."""

    rank: int
    faults: list[int]
    """Places in the pass's `swap_in`, which its `states_in` follow."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Proof).decode


class ProofReceiver:
    """Receives what all other ranks have found."""

    def __init__(self, socket: zmq.Socket[bytes], num_ranks: int, is_lost: Callable[[], object]) -> None:
        self._socket, self._is_lost = socket, is_lost
        self._found: dict[int, deque[list[int]]] = {rank: deque() for rank in range(1, num_ranks)}

    def next(self) -> set[int]:
        """Waits for the faults of the oldest pass that was not returned yet. Raises RuntimeError if the group has
        ended.
        """
        while not all(self._found.values()):
            while not self._socket.poll(_LOOK_MS):
                if self._is_lost():
                    raise RuntimeError("the group is over")
            proof = _decode(self._socket.recv())
            self._found[proof.rank].append(proof.faults)
        return {fault for found in self._found.values() for fault in found.popleft()}


class ProofSender:
    """Sends what this rank has found."""

    def __init__(self, address: str, rank: int, secret: PeerSecret | None = None) -> None:
        self._rank = rank
        self._socket = report_socket(address, secret)
        self._socket.set(zmq.LINGER, 0)

    def send(self, faults: list[int]) -> None:
        """Sends the faults of one pass."""
        self._socket.send(_encode(Proof(self._rank, faults)))
