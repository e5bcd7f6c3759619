"""Lets the prefix cache's tier in main memory span a group: each rank copies its own part of a page, and keeps it.

The first rank decides. Its commands go to the other ranks between those that launch passes, in the same order, so that
a copy follows the passes that compute its page on each rank. A copy has ended when it has on all ranks, and its digest
is made of theirs: a page counts as valid only if every part is.
"""

from collections.abc import Callable, Sequence

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core.kv_tiers.tier_memory import HostMemory, Moved, PageMove, StateMove
from mini_infer_engine.distributed.rank_socket import report_socket
from mini_infer_engine.distributed.step_messages import CopyBlocks, StepMessage
from mini_infer_engine.kv_host.pool_file import PoolFile


class Copied(msgspec.Struct, frozen=True):
    """Reports that a rank's part of a copy has ended."""

    rank: int
    ticket: int
    seconds: float
    digests: list[int]
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Copied).decode


def joined(parts: Sequence[Moved]) -> Moved:
    """Returns the copy of which these are all ranks' parts, in order. Its digests change if any part's does."""
    error = next((part.error for part in parts if part.error), "")
    digests = [
        sum(digest * (2 * rank + 1) for rank, digest in enumerate(own)) % (1 << 64)
        for own in zip(*(part.digests for part in parts), strict=not error)
    ]
    return Moved(parts[0].ticket, max(part.seconds for part in parts), digests, error)


class GroupHostMemory:
    """Implements `HostMemory` for the first rank. Its sizes are those of one rank's part."""

    layerwise = None
    """Pages come whole: a layer would have to be there on all ranks."""

    def __init__(
        self,
        local: HostMemory,
        num_ranks: int,
        send: Callable[[StepMessage], None],
        reports: zmq.Socket[bytes],
        shared: PoolFile | None = None,
    ) -> None:
        """Wraps the first rank's own memory, which is perhaps its part of a `shared` pool. `send` reaches all other
        ranks, which answer to the PULL socket.
        """
        self.shared = shared
        self._local, self._num_ranks, self._send, self._reports = local, num_ranks, send, reports
        self.num_pages, self.page_bytes, self.identity = local.num_pages, local.page_bytes, local.identity
        self.pages_per_state = local.pages_per_state
        self.latency_s, self.bytes_per_s = local.latency_s, local.bytes_per_s
        self._parts: dict[int, dict[int, Moved]] = {}
        """The parts that have ended of copies under way, by ticket and rank."""

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of all ranks' devices to their main memory."""
        self._begin(CopyBlocks(ticket, "store", list(moves), list(states)), self._local.store)

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of all ranks' main memory to their devices."""
        self._begin(CopyBlocks(ticket, "load", list(moves), list(states)), self._local.load)

    def _begin(self, command: CopyBlocks, copy: Callable[[int, Sequence[PageMove], Sequence[StateMove]], None]) -> None:
        self._send(command)
        # If it raises, what the others report of this ticket is ignored.
        copy(command.ticket, command.moves, command.states)
        self._parts[command.ticket] = {}

    def take(self) -> list[Moved]:
        """Returns the copies that have ended on all ranks since the last call, without waiting."""
        for moved in self._local.take():
            self._parts[moved.ticket][0] = moved
        while self._reports.poll(0):
            copied = _decode(self._reports.recv())
            parts = self._parts.get(copied.ticket)
            if parts is not None:
                parts[copied.rank] = Moved(copied.ticket, copied.seconds, copied.digests, copied.error)
        ended = [ticket for ticket, parts in self._parts.items() if len(parts) == self._num_ranks]
        found = [self._parts.pop(ticket) for ticket in ended]
        return [joined([parts[rank] for rank in range(self._num_ranks)]) for parts in found]

    def wait(self, timeout_s: float) -> None:
        """Waits until a part of a copy has ended, at most so long. Returns at once if nothing is being copied."""
        if any(0 not in parts for parts in self._parts.values()):
            self._local.wait(timeout_s)
        elif self._parts:
            self._reports.poll(int(timeout_s * 1000))

    def page_memory(self, page: int) -> memoryview:
        """Returns the first rank's bytes of a page."""
        return self._local.page_memory(page)


class RankCopies:
    """The copies of another rank. Only its main thread uses them."""

    def __init__(self, address: str, rank: int, secret: PeerSecret | None = None) -> None:
        self._rank, self._num_under_way = rank, 0
        self.memory: HostMemory | None = None
        """The rank's own memory, once it is loaded; None if there is none."""
        self._socket = report_socket(address, secret)
        self._socket.set(zmq.LINGER, 0)

    @property
    def are_under_way(self) -> bool:
        """True if `report` will have something to send later."""
        return self._num_under_way > 0

    def begin(self, command: CopyBlocks) -> None:
        """Begins a copy. One that cannot begin is reported as failed."""
        try:
            if self.memory is None:
                raise ValueError("this rank has no main memory for blocks")
            copy = self.memory.store if command.way == "store" else self.memory.load
            copy(command.ticket, command.moves, command.states)
        except Exception as error:
            self._send(Moved(command.ticket, 0.0, error=f"rank {self._rank}: {type(error).__name__}: {error}"))
        else:
            self._num_under_way += 1

    def report(self) -> None:
        """Reports the copies that have ended."""
        if self.memory is not None and self._num_under_way:
            for moved in self.memory.take():
                self._num_under_way -= 1
                self._send(moved)

    def _send(self, moved: Moved) -> None:
        self._socket.send(_encode(Copied(self._rank, moved.ticket, moved.seconds, list(moved.digests), moved.error)))
