"""Maps the file of a shared pool of pages, and knows which processes use it. It knows nothing of what pages contain.

Processes that use the file at the same time each have a row, which is locked for as long as the process lives: the
kernel gives the lock back however it ends. One more lock guards changes of the slots. All are open file description
locks (fcntl(2)), so that several users in one process exclude each other, too.
"""

import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 32
"""Most processes that use a pool at a time; each costs two bytes a page."""
REGION_SLOTS = 512
"""Slots whose changes are counted together."""
ALIGNMENT = 4096
_MAGIC = b"MIKVPOOL"
_VERSION = 1
_HEADER = struct.Struct("<8sIIIIQ64s")
"""Magic number, version, slots, bytes of a record, rows, bytes of a page, identity. It is written last."""
_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, process."""
_GUARD, _FIRST_ROW = 0, 1
"""The bytes of the file whose locks are the guard of changes, and the rows."""
_GUARD_WAIT_S, _OPEN_WAIT_S = 0.02, 300.0
"""Longest wait for other processes' changes, which take microseconds: one that was stopped meanwhile stops no other. A
process that creates the pool may take a minute to allocate its memory.
"""
_RETRY_S = 2e-5
_CHANGES_AT = 1024
"""The offset of the counter of changes, in the first block of the file."""


def aligned(num_bytes: int) -> int:
    """Returns the next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The sizes of a pool. The file has a header, the arrays of the slots, their records, and then the pages."""

    num_slots: int
    record_bytes: int
    page_bytes: int
    identity: str
    """Names everything that decides what a page's bytes mean besides its tokens, in up to 64 characters."""

    @property
    def num_regions(self) -> int:
        """Groups of slots whose changes are counted together."""
        return -(-self.num_slots // REGION_SLOTS)

    @property
    def pages_at(self) -> int:
        """The offset of the first page."""
        arrays = 8 * self.num_regions + (8 + 8 + 2 + 2 * MOST_ROWS) * self.num_slots
        return ALIGNMENT + aligned(arrays) + aligned(self.record_bytes * self.num_slots)

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.pages_at + self.num_slots * self.page_bytes

    @classmethod
    def within(cls, num_bytes: int, page_bytes: int, record_bytes: int, identity: str) -> "PoolLayout":
        """Returns the layout with the most slots in a file of `num_bytes`. Raises ValueError if none fits."""
        per_slot = page_bytes + record_bytes + 18 + 2 * MOST_ROWS
        for num_slots in range(num_bytes // per_slot, 0, -1):
            layout = cls(num_slots, record_bytes, page_bytes, identity)
            if layout.file_bytes <= num_bytes:
                return layout
        least = cls(1, record_bytes, page_bytes, identity).file_bytes
        raise ValueError(f"{num_bytes:,} bytes are too few for a page and its record: set at least {least:,}")

    def header(self) -> bytes:
        """Returns the header of a file with this layout."""
        name = self.identity.encode()
        return _HEADER.pack(_MAGIC, _VERSION, self.num_slots, self.record_bytes, MOST_ROWS, self.page_bytes, name)

    @classmethod
    def of_header(cls, data: bytes) -> "PoolLayout | None":
        """Returns the layout of a file by its header, or None if it has none of this version."""
        if len(data) < _HEADER.size:
            return None
        magic, version, num_slots, record_bytes, rows, page_bytes, name = _HEADER.unpack_from(data)
        if (magic, version, rows) != (_MAGIC, _VERSION, MOST_ROWS):
            return None
        return cls(num_slots, record_bytes, page_bytes, name.rstrip(b"\0").decode(errors="replace"))


class PoolFile:
    """A mapped pool, and this process's row in it."""

    def __init__(
        self, path: Path, layout: PoolLayout, *, reserves: bool, available_bytes: Callable[[], int] = lambda: 1 << 62
    ) -> None:
        """Opens the file, and creates its contents if it has none, or others that nobody uses.

        `layout` is that of new contents: contents with the same pages that somebody uses keep their own number of
        slots. With `reserves`, all memory is allocated now, so that no write fails later. Raises OSError if the file
        cannot be used: its file system is full, `available_bytes` of memory are too few, or other contents are in use.
        """
        self.path, self._available_bytes = path, available_bytes
        self.was_found = False
        """True if the file has contents of former engines, or of others that run."""
        self.is_void = False
        """True if those contents are of no use any more: whoever tracks them forgets them."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self._lock(_GUARD, wait_s=_OPEN_WAIT_S):
                raise OSError(errno.EBUSY, "another engine has been preparing it for minutes")
            self.layout = self._prepare(layout, reserves=reserves)
            self.row = self._take_row()
            self._map()
            self._unlock(_GUARD)
        except BaseException:
            os.close(self._file)
            raise

    @staticmethod
    def is_left(path: Path) -> bool:
        """Returns True if a file is a pool that no process uses."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            is_pool = os.pread(file, len(_MAGIC), 0) == _MAGIC
            return is_pool and not _is_locked(file, 0, _FIRST_ROW + MOST_ROWS)
        except OSError:
            return False
        finally:
            os.close(file)

    def _prepare(self, wanted: PoolLayout, *, reserves: bool) -> PoolLayout:
        found = PoolLayout.of_header(os.pread(self._file, _HEADER.size, 0))
        if found is not None and os.fstat(self._file).st_size == found.file_bytes:
            self.was_found = True
            if found == wanted:
                return found
            if any(self.is_alive(row) for row in range(MOST_ROWS)):
                if replace(found, num_slots=wanted.num_slots) != wanted:
                    raise OSError(errno.EBUSY, "engines of another model use it")
                return found
        self.was_found = False
        os.ftruncate(self._file, 0)
        if wanted.file_bytes > (available := self._available_bytes()):
            raise OSError(errno.ENOMEM, f"{wanted.file_bytes:,} bytes are more than the {available:,} of free memory")
        try:
            os.ftruncate(self._file, wanted.file_bytes)
            if reserves:
                os.posix_fallocate(self._file, 0, wanted.file_bytes)
            os.pwrite(self._file, wanted.header(), 0)
        except OSError:
            os.ftruncate(self._file, 0)
            raise
        return wanted

    def _take_row(self) -> int:
        for row in range(MOST_ROWS):
            if self._lock(_FIRST_ROW + row):
                return row
        raise OSError(errno.EBUSY, f"{MOST_ROWS} engines use it already")

    def _map(self) -> None:
        layout, num_slots = self.layout, self.layout.num_slots
        self.memory = mmap.mmap(self._file, layout.file_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages in shared memory
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        at = ALIGNMENT
        self.changes: NDArray[np.uint64] = np.frombuffer(self.memory, np.uint64, 1, _CHANGES_AT)
        """The number of changes of states, [1]."""
        self.region_changes: NDArray[np.uint64] = np.frombuffer(self.memory, np.uint64, layout.num_regions, at)
        """The number of changes of states in each region, [regions]."""
        at += 8 * layout.num_regions
        self.states: NDArray[np.uint64] = np.frombuffer(self.memory, np.uint64, num_slots, at)
        """The status of each slot, plus GENERATION times the number of contents that it has had, [slots]."""
        at += 8 * num_slots
        self.used_at: NDArray[np.uint64] = np.frombuffer(self.memory, np.uint64, num_slots, at)
        """The time of the last use of each slot, in microseconds of the monotonic clock, [slots]."""
        at += 8 * num_slots
        users = np.frombuffer(self.memory, np.uint16, MOST_ROWS * num_slots, at)
        self.users: NDArray[np.uint16] = users.reshape(num_slots, MOST_ROWS)
        """The number of users of each slot in each process, [slots, rows]. A living process alone writes to its row."""
        at += 2 * MOST_ROWS * num_slots
        self.owners: NDArray[np.uint16] = np.frombuffer(self.memory, np.uint16, num_slots, at)
        """The row of the process that fills or has filled each slot, [slots]."""
        self._records_at = layout.pages_at - aligned(layout.record_bytes * num_slots)
        self.pages = memoryview(self.memory)[layout.pages_at :]
        """The bytes of all pages, one after another."""

    def record(self, slot: int) -> memoryview:
        """Returns the bytes that describe the contents of a slot."""
        start = self._records_at + slot * self.layout.record_bytes
        return memoryview(self.memory)[start : start + self.layout.record_bytes]

    @contextmanager
    def guarded(self) -> Iterator[bool]:
        """Excludes the changes of other processes. Gives False, and excludes nobody, if one has stopped midway."""
        is_guarded = self._lock(_GUARD, wait_s=_GUARD_WAIT_S)
        try:
            yield is_guarded
        finally:
            if is_guarded:
                self._unlock(_GUARD)

    def is_alive(self, row: int) -> bool:
        """Returns True if another process has this row."""
        return _is_locked(self._file, _FIRST_ROW + row, 1)

    def close(self) -> None:
        """Gives the row back. The mapping, which has the file open, too, lasts as long as something refers to it."""
        self._unlock(_FIRST_ROW + self.row)
        os.close(self._file)

    def _lock(self, byte: int, *, wait_s: float = 0.0) -> bool:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() >= end_s:
                    return False
                time.sleep(_RETRY_S)
            else:
                return True

    def _unlock(self, byte: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def _is_locked(file: int, first: int, count: int) -> bool:
    """Returns True if another one has a lock of these bytes."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    (kind, *_) = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, request))
    return bool(kind != fcntl.F_UNLCK)
