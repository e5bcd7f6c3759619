"""Pages on the disk: written and read, bounded, found again after SIGKILL, and given up when the disk fails."""

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from mini_infer_engine.kv_disk.disk_store import DiskStore
from tests.engine.kv_disk.test_page_header import record_of

PAGE_BYTES = 8192


class Memory:
    """Main memory of a few pages, each with bytes of its own."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.data = mmap.mmap(-1, 8 * page_bytes)  # aligned, as direct I/O needs it

    def page(self, number: int) -> memoryview:
        return memoryview(self.data)[number * self.page_bytes : (number + 1) * self.page_bytes]

    def fill(self, number: int, seed: int) -> bytes:
        content = random.Random(seed).randbytes(self.page_bytes)
        self.page(number)[:] = content
        return content


def open_store(path: Path, memory: Memory, *, identity: str = "model", capacity: int = 1 << 20) -> DiskStore:
    store = DiskStore(DiskFolder(path, identity), capacity, memory.page_bytes, 32, memory.page)
    store.join_recovery()
    return store


def moved(store: DiskStore) -> DiskMoved:
    while True:
        store.wait(5.0)
        if ended := store.take():
            (only,) = ended
            return only


def write(store: DiskStore, memory: Memory, number: int) -> int:
    memory.fill(0, number)
    store.write(number, 0, record_of(number))
    result = moved(store)
    assert (result.ticket, result.error) == (number, "")
    return result.location


def read(store: DiskStore, memory: Memory, location: int) -> bytes:
    store.read(99, location, 5)
    assert moved(store) == DiskMoved(99, pytest.approx(0, abs=5))
    return bytes(memory.page(5))


def wait_until_empty(path: Path) -> None:
    end_s = time.monotonic() + 60
    while list(path.rglob("*.kv")):
        assert time.monotonic() < end_s, "files are still there"
        time.sleep(0.001)


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 5000])
def test_page_is_the_same_when_it_is_read_by_the_next_process(tmp_path: Path, page_bytes: int) -> None:
    memory = Memory(page_bytes)
    store = open_store(tmp_path, memory)
    locations = [write(store, memory, number) for number in range(5)]
    for number, location in enumerate(locations):
        assert read(store, memory, location) == random.Random(number).randbytes(page_bytes)
    store._folder.release()
    again = open_store(tmp_path, memory)
    found = {page.record.key: page for page in again.take_recovered()}
    assert found.keys() == {record_of(number).key for number in range(5)}
    for number in range(5):
        page = found[record_of(number).key]
        assert page.record.digest == 7
        assert read(again, memory, page.location) == random.Random(number).randbytes(page_bytes)


def test_no_page_is_found_when_the_model_has_changed(tmp_path: Path) -> None:
    memory = Memory()
    store = open_store(tmp_path, memory)
    write(store, memory, 1)
    store._folder.release()
    again = open_store(tmp_path, memory, identity="another model")
    assert again.take_recovered() == []
    assert again.used_bytes == 0


def test_each_engine_has_a_folder_of_its_own_when_several_share_a_path(tmp_path: Path) -> None:
    first, second = DiskFolder(tmp_path, "model"), DiskFolder(tmp_path, "model")
    assert first.path != second.path
    first.release()
    assert DiskFolder(tmp_path, "model").path == first.path


def test_engine_takes_the_folder_with_its_own_blocks_when_one_before_it_is_free_too(tmp_path: Path) -> None:
    memory, first = Memory(), DiskFolder(tmp_path, "former model")
    store = open_store(tmp_path, memory)
    write(store, memory, 1)
    first.release()
    store._folder.release()
    again = open_store(tmp_path, memory)
    assert again.path == store.path
    assert [page.record.key for page in again.take_recovered()] == [record_of(1).key]


def test_no_folder_keeps_blocks_when_its_model_was_replaced(tmp_path: Path) -> None:
    """Fewer engines run than before, and one of them had ranks."""
    memory, used = Memory(), DiskFolder(tmp_path, "former model")
    stores = [open_store(tmp_path, memory, identity="former model") for _ in range(2)]
    ranks = open_store(stores[1].path / "rank-1", memory, identity="rank 1")
    for store in (*stores, ranks):
        write(store, memory, 1)
        store._folder.release()
    used.segment(0).write_bytes(b"of an engine that runs")
    assert DiskFolder(tmp_path, "model").path == stores[0].path
    assert list(tmp_path.rglob("*.kv")) == [used.segment(0)]


def test_folder_is_used_when_its_identity_is_no_text(tmp_path: Path) -> None:
    DiskFolder(tmp_path, "model").release()
    (tmp_path / "engine-0" / "identity").write_bytes(b"\xff\xfe")
    (tmp_path / "engine-0" / "segment-0000000003.kv").write_bytes(b"x")
    folder = DiskFolder(tmp_path, "model")
    assert folder.segments() == {}
    assert (folder.path / "identity").read_text() == "model"


def test_files_are_within_a_smaller_size_when_an_engine_is_started_anew(tmp_path: Path) -> None:
    memory = Memory()
    store = open_store(tmp_path, memory, capacity=1_000_000)
    for number in range(60):
        write(store, memory, number)
    store._folder.release()
    again = open_store(tmp_path, memory, capacity=100_000)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.kv")) <= 100_000
    assert again.used_bytes <= 100_000
    for number in range(30):
        write(again, memory, number)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.kv")) <= 100_000


def test_oldest_pages_are_dropped_when_the_disk_tier_is_full(tmp_path: Path) -> None:
    memory = Memory()
    store = open_store(tmp_path, memory, capacity=100_000)
    assert store.capacity_bytes <= 100_000
    locations = [write(store, memory, number) for number in range(30)]
    dropped = store.take_dropped()
    assert dropped[0] == locations[0]
    assert sum(file.stat().st_size for file in store._folder.path.glob("*.kv")) <= 100_000
    store.read(1, locations[0], 5)
    assert moved(store).is_gone
    assert read(store, memory, locations[-1]) == random.Random(29).randbytes(PAGE_BYTES)
    store.clear()
    wait_until_empty(tmp_path)
    assert read(store, memory, write(store, memory, 77)) == random.Random(77).randbytes(PAGE_BYTES)


def test_torn_record_is_skipped_when_pages_are_recovered(tmp_path: Path) -> None:
    memory = Memory()
    store = open_store(tmp_path, memory)
    locations = [write(store, memory, number) for number in range(3)]
    number, offset = store.layout.place(locations[1])
    with store._folder.segment(number).open("r+b") as file:
        file.seek(offset + 20)
        file.write(b"torn")
    store._folder.release()
    found = {page.record.key for page in open_store(tmp_path, memory).take_recovered()}
    assert found == {record_of(0).key, record_of(2).key}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), None])
def test_write_ends_with_an_error_when_the_disk_is_full(tmp_path: Path, error: OSError | None) -> None:
    memory = Memory()

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        if error is not None:
            raise error
        return os.pwrite(file, data[: len(data) // 2], offset)

    folder = DiskFolder(tmp_path, "model")
    store = DiskStore(folder, 1 << 20, PAGE_BYTES, 32, memory.page, pwrite=pwrite)
    store.write(1, 0, record_of(1))
    assert moved(store).error
    folder.release()
    assert open_store(tmp_path, memory).take_recovered() == []


def test_read_ends_with_an_error_when_a_file_is_shorter_than_it_was(tmp_path: Path) -> None:
    memory = Memory()
    store = open_store(tmp_path, memory)
    location = write(store, memory, 1)
    os.truncate(store._folder.segment(0), 5000)
    store.read(2, location, 5)
    assert moved(store).error


_WRITER = """
import sys
from pathlib import Path
from tests.engine.kv_disk.test_disk_store import *
memory = Memory()
store = open_store(Path(sys.argv[1]), memory, capacity=1 << 19)
print("ready", flush=True)
for number in range(10**6):
    for place in range(4):
        memory.fill(place, 4 * number + place)
        store.write(4 * number + place, place, record_of(4 * number + place))
    ended = 0
    while ended < 4:
        store.wait(5.0)
        ended += len(store.take())
"""


def test_only_whole_pages_are_found_when_a_writer_was_killed(tmp_path: Path) -> None:
    memory, draw, found = Memory(), random.Random(3), 0
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            store = None
            for _ in range(draw.randrange(20_000)):  # some milliseconds of its writes
                store = writer.poll()
            assert store is None
            writer.send_signal(signal.SIGKILL)
        again = open_store(tmp_path, memory, capacity=1 << 19)
        for page in again.take_recovered():
            number = int.from_bytes(page.record.blocks[0].packed_tokens[:4], sys.byteorder)
            assert read(again, memory, page.location) == random.Random(number).randbytes(PAGE_BYTES)
            found += 1
        again._folder.release()
    assert found


def test_what_is_no_file_is_left_alone_when_its_name_is_that_of_a_segment(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, "model")
    (folder.path / "segment-0000000003.kv").write_bytes(bytes(7))
    (folder.path / "segment-0000000004.kv").mkdir()
    (folder.path / "segment-0000000005.kv").symlink_to("gone")
    assert folder.segments() == {3: 7}
    folder.release()
    another = DiskFolder(tmp_path, "another model")
    assert [path.name for path in another.path.glob("segment-*")] == ["segment-0000000004.kv"]
    another.release()
