"""Lets the prefix cache's tier on a disk span a group: each rank writes its own part of a page to a folder of its own.

The first rank decides, as it does for main memory (`host_copies`). A page is there only if every rank has its part of
the same copy: what one rank finds after a restart counts once all others have found it, and what one drops is gone.
Ranks fill and drop files at different times, so that pages have names between them, and locations in each.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMemory, DiskMoved, DiskPage, HostMemory
from mini_infer_engine.distributed.rank_socket import report_socket
from mini_infer_engine.distributed.step_messages import (
    ClearDisk,
    OpenDisk,
    ReadFromDisk,
    StepMessage,
    WriteToDisk,
)
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from mini_infer_engine.kv_disk.disk_store import DiskStore
from mini_infer_engine.kv_disk.page_header import decode_header, encode_header

_LOOK_MS = 100
_OPEN_S = 120.0
"""Seconds for all ranks to open their folders."""
_MOST_NAMES = 4096
"""Most names in a message."""


class DiskReport(msgspec.Struct, frozen=True):
    """Reports what has happened on a rank's disk."""

    rank: int
    is_open: bool = False
    """True in the first report."""
    error: str = ""
    """The reason why the disk could not be opened."""
    errno: int | None = None
    """The error of the operating system, if that was the reason."""
    ended: list[DiskMoved] = []
    recovered: list[bytes] = []
    dropped: list[bytes] = []
    """Names of pages that a former process has left, and of pages whose files were dropped."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DiskReport).decode


def name_of(record: PageRecord) -> bytes:
    """Returns a page's name among ranks. It has the digest of all parts: those of two copies never come together."""
    return record.key + record.digest.to_bytes(8, "little")


def joined(parts: Sequence[DiskMoved]) -> DiskMoved:
    """Returns the copy of which these are all ranks' parts, the first rank's first."""
    error = next((part.error for part in parts if part.error), "")
    is_gone = any(part.is_gone for part in parts)
    return DiskMoved(parts[0].ticket, max(part.seconds for part in parts), parts[0].location, is_gone, error)


class GroupDiskMemory:
    """Implements `DiskMemory` for the first rank. Sizes and locations are those of its own part."""

    def __init__(
        self,
        local: DiskMemory,
        num_ranks: int,
        send: Callable[[StepMessage], None],
        reports: zmq.Socket[bytes],
        lost: Callable[[], str] = str,
    ) -> None:
        """Wraps the first rank's own disk. `send` reaches all other ranks, which answer to the PULL socket. `lost`
        returns why the group has ended, or an empty string.
        """
        self._local, self._num_others, self._send, self._reports = local, num_ranks - 1, send, reports
        self._lost = lost
        self.capacity_bytes = local.capacity_bytes
        self.latency_s, self.bytes_per_s, self.fault = local.latency_s, local.bytes_per_s, local.fault
        self._parts: dict[int, dict[int, DiskMoved]] = {}
        """The parts that have ended of copies under way, by ticket and rank."""
        self._names: dict[int, bytes] = {}
        self._locations: dict[bytes, int] = {}
        """The pages of this rank."""
        self._writing: dict[int, bytes] = {}
        """The name of each page that is being written, by ticket."""
        self._found: dict[bytes, DiskPage] = {}
        """Pages that a former process has left here, and that not all others have found yet."""
        self._found_by: Counter[bytes] = Counter()
        self._recovered: list[DiskPage] = []
        self._dropped: list[int] = []

    def open(self, command: OpenDisk) -> None:
        """Has all other ranks open their folders. Raises OSError if one cannot for an error of the operating
        system, and ValueError for another reason or if none answers in time.
        """
        self._send(command)
        waiting, end_s = set(range(1, self._num_others + 1)), time.monotonic() + _OPEN_S
        while waiting:
            if not self._reports.poll(_LOOK_MS):
                if (reason := self._lost()) or time.monotonic() > end_s:
                    raise ValueError(f"--kv-disk-path: ranks {sorted(waiting)} do not answer: {reason or 'too late'}")
                continue
            report = _decode(self._reports.recv())
            if report.errno is not None:
                raise OSError(report.errno, report.error)
            if report.error:
                raise ValueError(report.error)
            waiting -= {report.rank} if report.is_open else set()
            self._take_in(report)

    @property
    def used_bytes(self) -> int:
        """Bytes of the first rank's files."""
        return self._local.used_bytes

    def write(self, ticket: int, host_page: int, record: PageRecord) -> None:
        """Writes all ranks' parts of a page."""
        self._send(WriteToDisk(ticket, host_page, encode_header(record)))
        self._local.write(ticket, host_page, record)  # if it raises, what the others report of this ticket is ignored
        self._parts[ticket] = {}
        self._writing[ticket] = name_of(record)

    def read(self, ticket: int, location: int, host_page: int) -> None:
        """Reads all ranks' parts of a page."""
        self._send(ReadFromDisk(ticket, self._names.get(location, b""), host_page))
        self._local.read(ticket, location, host_page)
        self._parts[ticket] = {}

    def take(self) -> list[DiskMoved]:
        """Returns the copies that have ended on all ranks since the last call, without waiting."""
        for moved in self._local.take():
            self._parts[moved.ticket][0] = moved
        self._receive()
        ended = [ticket for ticket, parts in self._parts.items() if len(parts) == 1 + self._num_others]
        return [self._joined(ticket) for ticket in ended]

    def _joined(self, ticket: int) -> DiskMoved:
        parts = self._parts.pop(ticket)
        moved = joined([parts[rank] for rank in range(1 + self._num_others)])
        name = self._writing.pop(ticket, None)
        if name is not None and not moved.error and not moved.is_gone:
            self._know(name, moved.location)
        return moved

    def _know(self, name: bytes, location: int) -> None:
        self._names[location], self._locations[name] = name, location

    def take_recovered(self) -> list[DiskPage]:
        """Returns the pages whose parts former processes have left on all ranks, as far as they have been found."""
        for page in self._local.take_recovered():
            self._found[name_of(page.record)] = page
            self._match(name_of(page.record))
        self._receive()
        recovered, self._recovered = self._recovered, []
        return recovered

    def _match(self, name: bytes) -> None:
        if name in self._found and self._found_by[name] == self._num_others:
            page = self._found.pop(name)
            del self._found_by[name]
            self._know(name, page.location)
            self._recovered.append(page)

    def take_dropped(self) -> list[int]:
        """Returns the locations of pages of which any rank has dropped its part since the last call."""
        self._receive()
        for location in self._local.take_dropped():
            self._forget(location)
        dropped, self._dropped = self._dropped, []
        return dropped

    def _forget(self, location: int) -> None:
        name = self._names.pop(location, None)
        if name is not None and self._locations.get(name) == location:
            del self._locations[name]
        self._dropped.append(location)

    def _receive(self) -> None:
        while self._reports.poll(0):
            self._take_in(_decode(self._reports.recv()))

    def _take_in(self, report: DiskReport) -> None:
        for moved in report.ended:
            if moved.ticket in self._parts:
                self._parts[moved.ticket][report.rank] = moved
        for name in report.recovered:
            self._found_by[name] += 1
            self._match(name)
        for name in report.dropped:
            self._found_by.pop(name, None)
            if (location := self._locations.get(name)) is not None:
                self._forget(location)

    def wait(self, timeout_s: float) -> None:
        """Waits until a part of a copy has ended, at most so long. Returns at once if nothing is being copied.

        Raises RunnerLostError if the group has ended: a lost rank reports no copies.
        """
        if self._parts and (reason := self._lost()):
            raise RunnerLostError(reason)
        if any(0 not in parts for parts in self._parts.values()):
            self._local.wait(timeout_s)
        elif self._parts:
            self._reports.poll(int(timeout_s * 1000))

    def clear(self) -> None:
        """Drops all files of all ranks."""
        self._send(ClearDisk())
        self._local.clear()
        self._names.clear()
        self._locations.clear()
        self._found.clear()
        self._found_by.clear()


class RankDisk:
    """The disk of another rank. Only its main thread uses it."""

    def __init__(self, address: str, rank: int, secret: PeerSecret | None = None) -> None:
        self._rank, self._num_under_way = rank, 0
        self._store: DiskStore | None = None
        self._locations: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._writing: dict[int, bytes] = {}
        self._socket = report_socket(address, secret)
        self._socket.set(zmq.LINGER, 0)

    @property
    def are_under_way(self) -> bool:
        """True if `report` will have something to send later."""
        return self._num_under_way > 0 or (self._store is not None and self._store.is_recovering)

    def open(self, command: OpenDisk, memory: HostMemory | None) -> None:
        """Opens this rank's folder, and reports that, or why it cannot be used."""
        try:
            if memory is None:
                raise ValueError("this rank has no main memory for blocks")
            path = Path(command.path) / f"rank-{self._rank}"
            folder = DiskFolder(path, f"{command.identity}, rank {self._rank}, {memory.page_bytes} bytes")
            self._store = DiskStore(
                folder, command.capacity_bytes, memory.page_bytes, command.page_tokens, memory.page_memory
            )
        except OSError as error:
            reason = f"rank {self._rank}: {error.filename or path}: {error.strerror or error}"
            self._send(DiskReport(self._rank, error=reason, errno=error.errno or 0))
        except ValueError as error:
            self._send(DiskReport(self._rank, error=f"--kv-disk-path {command.path}: rank {self._rank}: {error}"))
        else:
            self._send(DiskReport(self._rank, is_open=True))

    def write(self, command: WriteToDisk) -> None:
        """Begins to write a page. One that cannot be written is reported as failed."""
        record = decode_header(command.header)
        if record is None:
            self._fail(command.ticket, "the record of a page cannot be read")
        elif self._begin(command.ticket, lambda store: store.write(command.ticket, command.host_page, record)):
            self._writing[command.ticket] = name_of(record)

    def read(self, command: ReadFromDisk) -> None:
        """Begins to read a page. One that was dropped meanwhile is reported as gone."""
        location = self._locations.get(command.name)
        if location is None:
            self._send(DiskReport(self._rank, ended=[DiskMoved(command.ticket, 0.0, is_gone=True)]))
        else:
            self._begin(command.ticket, lambda store: store.read(command.ticket, location, command.host_page))

    def _begin(self, ticket: int, start: Callable[[DiskStore], None]) -> bool:
        try:
            if self._store is None:
                raise ValueError("its disk is not open")
            start(self._store)
        except Exception as error:
            self._fail(ticket, f"{type(error).__name__}: {error}")
            return False
        self._num_under_way += 1
        return True

    def _fail(self, ticket: int, reason: str) -> None:
        self._send(DiskReport(self._rank, ended=[DiskMoved(ticket, 0.0, error=f"rank {self._rank}: {reason}")]))

    def clear(self) -> None:
        """Drops all files."""
        if self._store is not None:
            self._store.clear()
            self._store.take_dropped()
        self._locations.clear()
        self._names.clear()

    def report(self) -> None:
        """Reports what has ended, and which pages have been found and dropped."""
        if self._store is None:
            return
        ended = self._store.take()
        self._num_under_way -= len(ended)
        for moved in ended:
            name = self._writing.pop(moved.ticket, None)
            if name is not None and not moved.error and not moved.is_gone:
                self._know(name, moved.location)
        recovered = self._recover()
        dropped = [name for location in self._store.take_dropped() if (name := self._forget(location)) is not None]
        if ended or recovered or dropped:
            first = slice(0, _MOST_NAMES)
            self._send(DiskReport(self._rank, ended=ended, recovered=recovered[first], dropped=dropped[first]))
            for begin in range(_MOST_NAMES, max(len(recovered), len(dropped)), _MOST_NAMES):
                some = slice(begin, begin + _MOST_NAMES)
                self._send(DiskReport(self._rank, recovered=recovered[some], dropped=dropped[some]))

    def _recover(self) -> list[bytes]:
        """Returns the names of pages that a former process has left, each once."""
        assert self._store is not None
        pages = {name_of(page.record): page.location for page in self._store.take_recovered()}
        new = {name: location for name, location in pages.items() if name not in self._locations}
        for name, location in new.items():
            self._know(name, location)
        return list(new)

    def _know(self, name: bytes, location: int) -> None:
        self._names[location], self._locations[name] = name, location

    def _forget(self, location: int) -> bytes | None:
        """Returns the name of a page whose file was dropped; None if there is another copy of it, or none was here."""
        name = self._names.pop(location, None)
        if name is None or self._locations.get(name) != location:
            return None
        del self._locations[name]
        return name

    def _send(self, report: DiskReport) -> None:
        self._socket.send(_encode(report))
