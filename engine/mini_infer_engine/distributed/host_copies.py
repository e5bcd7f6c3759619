"""Lets the prefix cache's tier in main memory span a group: each rank copies its own part of a page, and keeps it.

The first rank decides. Its commands go to the other ranks between those that launch passes, in the same order, so that
a copy follows the passes that compute its page on each rank. A copy has ended when it has on all ranks, and its digest
is made of theirs: a page counts as valid only if every part is. A load that goes with a pass does so on each rank,
whose pass waits for its own part alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.kv_tiers.tier_memory import (
    HostMemory,
    LayerwiseHostMemory,
    LayerwiseLoad,
    Moved,
    PageMove,
    StateMove,
)
from mini_infer_engine.distributed.rank_socket import report_socket
from mini_infer_engine.distributed.step_messages import CopyBlocks, StepMessage
from mini_infer_engine.kv_host.pool_file import PoolFile

_Begun = TypeVar("_Begun")
_LOOK_S, _BOTH_S = 0.1, 0.001
"""Seconds between two checks that the group still runs, while waiting for other ranks, and between two looks at copies
of this rank and reports of others, while waiting for both.
"""


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


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The `LayerwiseLoad` of the first rank, whose pass follows its own part. Others find theirs by the ticket."""

    ticket: int
    own: LayerwiseLoad | None
    """None if this rank could not begin its part."""

    def wait_for_layer(self, layer: int) -> None:
        """Waits until this rank's part of the layer is there."""
        if self.own is not None:
            self.own.wait_for_layer(layer)


def tickets_of(loads: Sequence[LayerwiseLoad]) -> list[int]:
    """Returns the tickets by which other ranks find their parts of these loads. Loads that never began have none."""
    return [load.ticket for load in loads if isinstance(load, GroupLoad)]


class GroupHostMemory:
    """Implements `HostMemory` for the first rank, and `LayerwiseHostMemory` if all ranks can load by layer. Its sizes
    are those of one rank's part.
    """

    def __init__(
        self,
        local: HostMemory,
        num_ranks: int,
        send: Callable[[StepMessage], None],
        reports: zmq.Socket[bytes],
        shared: PoolFile | None = None,
        lost: Callable[[], str] = str,
    ) -> None:
        """Wraps the first rank's own memory, which is perhaps its part of a `shared` pool. `send` reaches all other
        ranks, which answer to the PULL socket. `lost` returns why the group has ended, or an empty string.
        """
        self.shared, self._lost = shared, lost
        self._local, self._num_ranks, self._send, self._reports = local, num_ranks, send, reports
        self.num_pages, self.page_bytes, self.identity = local.num_pages, local.page_bytes, local.identity
        self.pages_per_state = local.pages_per_state
        self.latency_s, self.bytes_per_s = local.latency_s, local.bytes_per_s
        self.least_load_s = 0.0 if local.layerwise is None else local.layerwise.least_load_s
        self._parts: dict[int, dict[int, Moved]] = {}
        """The parts that have ended of copies under way, by ticket and rank."""

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of all ranks' devices to their main memory."""
        command = CopyBlocks(ticket, "store", list(moves), list(states))
        self._begin(command, lambda: self._local.store(ticket, moves, states))

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of all ranks' main memory to their devices."""
        command = CopyBlocks(ticket, "load", list(moves), list(states))
        self._begin(command, lambda: self._local.load(ticket, moves, states))

    @property
    def layerwise(self) -> LayerwiseHostMemory | None:
        """The memory itself if passes can follow its copies, which holds for all ranks or for none."""
        return None if self._local.layerwise is None else self

    def load_layerwise(self, ticket: int, moves: Sequence[PageMove]) -> GroupLoad:
        """Copies pages of all ranks' main memory to their devices, the first layer of all pages first. `tickets_of` the
        load goes to other ranks with the pass that follows it.
        """
        own = self._local.layerwise
        assert own is not None, "pages of this memory come whole"
        command = CopyBlocks(ticket, "load_layerwise", list(moves))
        return GroupLoad(ticket, self._begin(command, lambda: own.load_layerwise(ticket, moves)))

    def _begin(self, command: CopyBlocks, copy: Callable[[], _Begun]) -> _Begun | None:
        """Returns what `copy` does, or None if it raises. The copy then fails once it has ended on the other ranks,
        which have begun it: until then they use its pages.
        """
        self._send(command)
        parts = self._parts[command.ticket] = {}
        try:
            return copy()
        except Exception as error:
            parts[0] = failed(command.ticket, 0, error)
            return None

    def take(self) -> list[Moved]:
        """Returns the copies that have ended on all ranks since the last call, without waiting."""
        self._gather()
        found = [self._parts.pop(ticket) for ticket in self._ended]
        return [joined([parts[rank] for rank in range(self._num_ranks)]) for parts in found]

    def _gather(self) -> None:
        """Takes in the parts that have ended since the last call."""
        for moved in self._local.take():
            self._parts[moved.ticket][0] = moved
        while self._reports.poll(0):
            copied = _decode(self._reports.recv())
            parts = self._parts.get(copied.ticket)
            if parts is not None:
                parts[copied.rank] = Moved(copied.ticket, copied.seconds, copied.digests, copied.error)

    @property
    def _ended(self) -> list[int]:
        """Tickets of the copies that have ended on all ranks."""
        return [ticket for ticket, parts in self._parts.items() if len(parts) == self._num_ranks]

    def wait(self, timeout_s: float) -> None:
        """Waits until `take` has something to return, at most so long. Returns at once if nothing is being copied.

        Raises RunnerLostError if the group has ended: a lost rank reports no copies.
        """
        end_s = time.monotonic() + timeout_s
        self._gather()
        while self._parts and not self._ended and (left_s := end_s - time.monotonic()) > 0:
            if reason := self._lost():
                raise RunnerLostError(reason)
            waits_for_own = any(0 not in parts for parts in self._parts.values())
            waits_for_others = any(0 in parts for parts in self._parts.values())
            if waits_for_own:
                self._local.wait(min(left_s, _BOTH_S if waits_for_others else _LOOK_S))
            else:
                self._reports.poll(int(min(left_s, _LOOK_S) * 1000) + 1)
            self._gather()

    def page_memory(self, page: int) -> memoryview:
        """Returns the first rank's bytes of a page."""
        return self._local.page_memory(page)


def failed(ticket: int, rank: int, error: Exception) -> Moved:
    """Returns the part of a rank that could not begin it."""
    return Moved(ticket, 0.0, error=f"rank {rank}: {type(error).__name__}: {error}")


class RankCopies:
    """The copies of another rank. Only its main thread uses them."""

    def __init__(self, address: str, rank: int, secret: PeerSecret | None = None) -> None:
        self._rank, self._num_under_way = rank, 0
        self.memory: HostMemory | None = None
        """The rank's own memory, once it is loaded; None if there is none."""
        self._loads: dict[int, LayerwiseLoad] = {}
        """Loads that have begun since the last pass, which the next one may follow, by ticket."""
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
            self._copy(self.memory, command)
        except Exception as error:
            self._send(failed(command.ticket, self._rank, error))
        else:
            self._num_under_way += 1

    def _copy(self, memory: HostMemory, command: CopyBlocks) -> None:
        match command.way:
            case "store":
                memory.store(command.ticket, command.moves, command.states)
            case "load":
                memory.load(command.ticket, command.moves, command.states)
            case "load_layerwise":
                if memory.layerwise is None:
                    raise ValueError("pages of this rank come whole")
                self._loads[command.ticket] = memory.layerwise.load_layerwise(command.ticket, command.moves)

    def take_followed(self, tickets: Sequence[int]) -> list[LayerwiseLoad]:
        """Returns the loads that the next pass follows, as far as they could begin. Forgets all others: a load goes
        with the pass that is launched next after it, or with none.
        """
        loads, self._loads = self._loads, {}
        return [loads[ticket] for ticket in tickets if ticket in loads]

    def report(self) -> None:
        """Reports the copies that have ended."""
        if self.memory is not None and self._num_under_way:
            for moved in self.memory.take():
                self._num_under_way -= 1
                self._send(moved)

    def _send(self, moved: Moved) -> None:
        self._socket.send(_encode(Copied(self._rank, moved.ticket, moved.seconds, list(moved.digests), moved.error)))
