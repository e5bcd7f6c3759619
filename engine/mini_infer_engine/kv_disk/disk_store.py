"""Implements `DiskMemory`: writes pages to segment files and reads them, by a few threads.

A page is written before its header, so that a header that is whole stands before a page that is. Nothing is synced:
what a loss of power leaves behind is found by the digests of pages. Direct I/O is used where memory is aligned for it
and the file system supports it: pages then cost no page cache, and no copy.
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread, local

from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved, DiskPage
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from mini_infer_engine.kv_disk.page_header import decode_header, encode_header
from mini_infer_engine.kv_disk.segments import ALIGNMENT, LogLayout, SegmentLog

NUM_THREADS = 4
"""Enough for a disk to work on several pages at once."""
_MOST_SALT_BYTES = 1024

PWrite = Callable[[int, memoryview, int], int]


class _Segment:
    """An open segment file, which is closed when nothing reads or writes it any more."""

    def __init__(self, path: Path, *, is_direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self.file = os.open(path, flags | (os.O_DIRECT if is_direct else 0), 0o600)
        except OSError:
            if not is_direct:
                raise
            self.file = os.open(path, flags, 0o600)  # such as tmpfs, which knows no direct I/O

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


class DiskStore:
    """The segment files of one engine."""

    latency_s = 0.002
    bytes_per_s = 1e9
    fault = ""

    def __init__(
        self,
        folder: DiskFolder,
        capacity_bytes: int,
        page_bytes: int,
        page_tokens: int,
        page_memory: Callable[[int], memoryview],
        *,
        pwrite: PWrite = os.pwrite,
    ) -> None:
        """Opens the files of a folder; what they have is read by a thread. `page_memory` returns the bytes of a page
        of main memory, the first of which is aligned.

        Raises ValueError if the capacity is too small.
        """
        header_bytes = 512 + 6 * page_tokens + _MOST_SALT_BYTES
        self.layout = LogLayout.of(page_bytes, header_bytes, capacity_bytes)
        self.capacity_bytes = self.layout.num_segments * self.layout.slots_per_segment * self.layout.slot_bytes
        self._folder, self._page_memory, self._pwrite = folder, page_memory, pwrite
        self._is_direct = page_bytes % ALIGNMENT == 0
        self._log = SegmentLog(self.layout, folder.segments())
        self._files: dict[int, _Segment] = {}
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._changed = Condition()
        self._ended: deque[DiskMoved] = deque()
        self._num_under_way = 0
        self._recovered: list[DiskPage] = []
        self._dropped: list[int] = []
        self._buffers = local()
        self._drop(self._log.trim())
        self._recovery = Thread(target=self._recover, args=(self._log.segments,), name="kv-disk-recovery", daemon=True)
        self._recovery.start()
        for number in range(NUM_THREADS):
            Thread(target=self._run, name=f"kv-disk-{number}", daemon=True).start()

    @property
    def path(self) -> Path:
        """The folder of its files."""
        return self._folder.path

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are written."""
        return self._log.used_bytes

    def take_recovered(self) -> list[DiskPage]:
        """Returns pages that a former process has written, as far as they have been found since the last call."""
        with self._changed:
            recovered, self._recovered = self._recovered, []
        return recovered

    @property
    def is_recovering(self) -> bool:
        """True if `take_recovered` may return something later."""
        return self._recovery.is_alive() or bool(self._recovered)

    def join_recovery(self) -> None:
        """Waits until all pages of a former process have been found."""
        self._recovery.join()

    def write(self, ticket: int, host_page: int, record: PageRecord) -> None:
        """Writes a page of main memory to the end of the log. Raises OSError if no file can be created."""
        header = encode_header(record)
        if len(header) > self.layout.header_bytes:
            self._finish(DiskMoved(ticket, 0.0, is_gone=True))  # a salt of thousands of characters
            return
        location, dropped = self._log.append()
        self._drop(dropped)
        number, offset = self.layout.place(location)
        segment = self._segment(number)

        def run(begin_s: float) -> DiskMoved:
            self._write_all(segment.file, self._page_memory(host_page), offset + self.layout.header_bytes)
            buffer = self._header_buffer()
            buffer[: len(header)] = header
            buffer[len(header) :] = bytes(len(buffer) - len(header))
            self._write_all(segment.file, buffer, offset)
            return DiskMoved(ticket, time.perf_counter() - begin_s, location)

        self._request(ticket, run)

    def read(self, ticket: int, location: int, host_page: int) -> None:
        """Reads a page into main memory."""
        number, offset = self.layout.place(location)
        if number not in self._log:
            self._finish(DiskMoved(ticket, 0.0, is_gone=True))
            return
        segment = self._segment(number)

        def run(begin_s: float) -> DiskMoved:
            memory = self._page_memory(host_page)
            count = os.preadv(segment.file, [memory], offset + self.layout.header_bytes)
            if count != len(memory):
                raise OSError(f"segment {number} has {count} of the {len(memory)} bytes of a page")
            return DiskMoved(ticket, time.perf_counter() - begin_s)

        self._request(ticket, run)

    def take(self) -> list[DiskMoved]:
        """Returns the writes and reads that have ended since the last call, without waiting."""
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def take_dropped(self) -> list[int]:
        """Returns the locations whose files were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def wait(self, timeout_s: float) -> None:
        """Waits until something has been written or read, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._num_under_way, timeout_s)

    def clear(self) -> None:
        """Drops all files. A thread removes them: there may be hundreds."""
        segments = self._log.clear()
        for number in segments:
            self._files.pop(number, None)
            self._dropped += self._log.locations(number)
        paths = [self._folder.segment(number) for number in segments]

        def remove() -> None:
            for path in paths:
                with suppress(OSError):  # the disk has failed, perhaps
                    path.unlink(missing_ok=True)

        self._requests.put(remove)

    def _segment(self, number: int) -> _Segment:
        segment = self._files.get(number)
        if segment is None:
            segment = self._files[number] = _Segment(self._folder.segment(number), is_direct=self._is_direct)
        return segment

    def _drop(self, segments: list[int]) -> None:
        for number in segments:
            self._files.pop(number, None)
            self._folder.segment(number).unlink(missing_ok=True)
            self._dropped += self._log.locations(number)

    def _write_all(self, file: int, data: memoryview, offset: int) -> None:
        count = self._pwrite(file, data, offset)
        if count != len(data):
            raise OSError(f"{count} of {len(data)} bytes were written: the disk is full")

    def _header_buffer(self) -> memoryview:
        """Returns aligned memory for a header, of this thread alone."""
        if not hasattr(self._buffers, "header"):
            self._buffers.header = memoryview(mmap.mmap(-1, self.layout.header_bytes))
        header: memoryview = self._buffers.header
        return header

    def _request(self, ticket: int, work: Callable[[float], DiskMoved]) -> None:
        begin_s = time.perf_counter()

        def run() -> None:
            try:
                moved = work(begin_s)
            except Exception as error:  # it must reach the engine, which turns the tier off
                moved = DiskMoved(ticket, 0.0, error=f"{type(error).__name__}: {error}")
            self._finish(moved, is_request=True)

        with self._changed:
            self._num_under_way += 1
        self._requests.put(run)

    def _finish(self, moved: DiskMoved, *, is_request: bool = False) -> None:
        with self._changed:
            self._ended.append(moved)
            self._num_under_way -= is_request
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            self._requests.get()()

    def _recover(self, segments: list[int]) -> None:
        """Reads the headers of all slots. A slot without a whole header is skipped."""
        for number in segments:
            found = []
            try:
                with self._folder.segment(number).open("rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    for location in self._log.locations(number):
                        offset = self.layout.place(location)[1]
                        if offset + self.layout.header_bytes + self.layout.page_bytes > size:
                            break
                        record = decode_header(os.pread(file.fileno(), self.layout.header_bytes, offset))
                        if record is not None:
                            found.append(DiskPage(record, location))
            except OSError:
                continue  # it was dropped meanwhile, or cannot be read: a miss
            with self._changed:
                self._recovered += found
