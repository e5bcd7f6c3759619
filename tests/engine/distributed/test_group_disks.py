"""Blocks on the disks of several ranks: each writes its part, and a page is there only if every part of it is."""

import errno
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import zmq

from mini_infer_engine import LLM
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved
from mini_infer_engine.core.prefix_cache import Block
from mini_infer_engine.distributed import disk_copies
from mini_infer_engine.distributed.disk_copies import GroupDiskMemory, RankDisk, joined
from mini_infer_engine.distributed.step_messages import (
    ClearDisk,
    OpenDisk,
    ReadFromDisk,
    StepMessage,
    WriteToDisk,
)
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from mini_infer_engine.kv_disk.disk_store import DiskStore
from mini_infer_engine.kv_disk.page_header import encode_header
from tests.engine.distributed.test_group_tiers import FakeMemory, tokens
from tests.engine.models.test_models import VARIANTS
from tests.support.tiny_models import save_tiny_model

PAGE_BYTES, PAGE_TOKENS, CAPACITY = 4096, 16, 1 << 20


def record(number: int, digest: int = 7) -> PageRecord:
    return PageRecord((Block(0, bytes([number]) * 16, None, bytes(64), "", []),), digest)


class MemoryOfPages(FakeMemory):
    """Main memory of one rank."""

    def __init__(self) -> None:
        super().__init__(num_pages=8, page_bytes=PAGE_BYTES)
        self.memory = mmap.mmap(-1, self.num_pages * PAGE_BYTES)  # aligned, as direct I/O needs it

    def page_memory(self, page: int) -> memoryview:
        return memoryview(self.memory)[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


class Group:
    """Two ranks in this process, with their disks in one folder."""

    def __init__(self, folder: Path, address: str) -> None:
        self.reports = zmq.Context.instance().socket(zmq.PULL)
        self.reports.bind(address)
        self.first, self.second = MemoryOfPages(), MemoryOfPages()
        self.rank = RankDisk(address, 1)
        own = DiskFolder(folder, "model")
        self.folders = [own]
        self.store = DiskStore(own, CAPACITY, PAGE_BYTES, PAGE_TOKENS, self.first.page_memory)
        self.lost = ""
        self.disk = GroupDiskMemory(self.store, 2, self._send, self.reports, lambda: self.lost)
        self.disk.open(OpenDisk(str(own.path), "model", CAPACITY, PAGE_TOKENS))

    def _send(self, message: StepMessage) -> None:
        match message:
            case OpenDisk():
                self.rank.open(message, self.second)
            case WriteToDisk():
                self.rank.write(message)
            case ReadFromDisk():
                self.rank.read(message)
            case ClearDisk():
                self.rank.clear()
            case _:
                raise AssertionError(message)

    def until(self, is_done: Callable[[], object]) -> None:
        """Has the other rank report until something holds."""
        end_s = time.monotonic() + 60
        while not is_done():
            self.rank.report()
            assert time.monotonic() < end_s

    def moved(self) -> DiskMoved:
        """Waits for the one copy that is under way."""
        ended: list[DiskMoved] = []
        self.until(lambda: ended.extend(self.disk.take()) or ended)
        (only,) = ended
        return only

    def write(self, number: int, byte: int, digest: int = 7) -> DiskMoved:
        """Writes a page of main memory with other bytes on each rank."""
        self.first.page_memory(0)[:] = bytes([byte]) * PAGE_BYTES
        self.second.page_memory(0)[:] = bytes([byte + 1]) * PAGE_BYTES
        self.disk.write(number, 0, record(number, digest))
        return self.moved()

    def recovered(self) -> list[bytes]:
        """The keys of what former processes have left, once both ranks have looked through their files."""
        self.store.join_recovery()
        assert self.rank._store is not None
        self.rank._store.join_recovery()
        self.rank.report()
        assert self.reports.poll(60_000)
        return sorted(page.record.key for page in self.disk.take_recovered())

    def close(self) -> None:
        """Leaves the files as the end of the processes does."""
        self.reports.close(linger=0)
        self.folders[0].release()
        assert self.rank._store is not None
        self.rank._store._folder.release()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path, f"inproc://disks-{uuid4()}")  # an address stays taken for a moment
    yield made
    made.close()


def test_each_rank_reads_its_own_part_when_a_page_comes_back(group: Group) -> None:
    moved = group.write(1, 50)
    assert (moved.error, moved.is_gone) == ("", False)
    group.disk.read(2, moved.location, 5)
    assert group.moved() == DiskMoved(2, pytest.approx(0, abs=20), -1)
    assert bytes(group.first.page_memory(5)) == bytes([50]) * PAGE_BYTES
    assert bytes(group.second.page_memory(5)) == bytes([51]) * PAGE_BYTES


def test_wait_raises_when_the_group_is_lost(group: Group) -> None:
    moved = group.write(1, 50)
    group.lost = "rank 1 has ended"
    group.disk.wait(60.0)
    group.disk.read(2, moved.location, 5)
    with pytest.raises(RunnerLostError):
        group.disk.wait(60.0)


def test_page_is_gone_when_one_rank_has_dropped_its_part(group: Group) -> None:
    moved = group.write(1, 50)
    group.rank.clear()
    group.disk.read(2, moved.location, 5)
    assert group.moved().is_gone


def test_location_is_dropped_when_another_rank_drops_its_file(group: Group) -> None:
    moved = group.write(1, 50)
    store = group.rank._store
    assert store is not None
    store._drop(store._log.clear())
    dropped: list[int] = []
    group.until(lambda: dropped.extend(group.disk.take_dropped()) or dropped)
    assert dropped == [moved.location]


def test_write_fails_with_the_reason_when_one_rank_cannot_write(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(group.rank._store, "_pwrite", full)
    assert "no space left" in group.write(1, 50).error


def test_write_fails_with_the_reason_when_a_record_cannot_be_read(group: Group) -> None:
    group.rank.write(WriteToDisk(5, 0, b"no record"))
    group.disk._parts[5] = {0: DiskMoved(5, 0.0, 1)}
    assert "rank 1" in group.moved().error


def test_pages_are_found_after_a_restart_when_every_rank_has_its_part_of_the_same_copy(tmp_path: Path) -> None:
    before = Group(tmp_path, "inproc://disks-before")
    before.write(1, 50)
    before.write(2, 60)
    lone = before.store
    lone.write(99, 0, record(3))  # a kill after the first rank's write
    while not any(moved.ticket == 99 for moved in lone.take()):
        pass
    before.rank.write(_write_of(record(4)))
    before.until(lambda: not before.rank._num_under_way)
    lone.write(97, 0, record(5, digest=1))
    before.rank.write(_write_of(record(5, digest=2)))  # parts of two copies of one page
    before.until(lambda: not before.rank._num_under_way)
    while not any(moved.ticket == 97 for moved in lone.take()):
        pass
    before.close()
    after = Group(tmp_path, "inproc://disks-after")
    assert after.recovered() == [bytes([1]) * 16, bytes([2]) * 16]
    after.close()


def _write_of(page: PageRecord) -> WriteToDisk:
    return WriteToDisk(1000, 0, encode_header(page))


def test_nothing_is_found_when_all_was_cleared(group: Group) -> None:
    moved = group.write(1, 50)
    group.disk.clear()
    assert moved.location in group.disk.take_dropped()
    assert group.store.used_bytes == 0


def test_start_is_refused_when_a_rank_cannot_open_its_folder(tmp_path: Path) -> None:
    (tmp_path / "engine-0").mkdir()
    (tmp_path / "engine-0" / "rank-1").write_text("no folder")
    with pytest.raises(NotADirectoryError, match="rank 1"):
        Group(tmp_path, "inproc://disks-refused")


def test_the_error_is_the_systems_when_a_rank_has_a_failed_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingFolder:
        def __init__(self, path: Path, identity: str) -> None:
            del identity
            raise OSError(errno.EIO, "the reason", str(path))

    monkeypatch.setattr(disk_copies, "DiskFolder", FailingFolder)
    with pytest.raises(OSError, match="rank 1") as failed:
        Group(tmp_path, "inproc://disks-failed")
    assert failed.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([DiskMoved(1, 0.1, 5), DiskMoved(1, 0.3, 9)], DiskMoved(1, 0.3, 5)),
        ([DiskMoved(1, 0.1, 5), DiskMoved(1, 0.0, is_gone=True)], DiskMoved(1, 0.1, 5, is_gone=True)),
        ([DiskMoved(1, 0.1, 5), DiskMoved(1, 0.0, error="full")], DiskMoved(1, 0.1, 5, error="full")),
    ],
)
def test_a_copy_is_what_its_parts_are(parts: list[DiskMoved], expected: DiskMoved) -> None:
    assert joined(parts) == expected


@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen3", {"pipeline_parallel_size": 2}),
        ("qwen3-next", {"tensor_parallel_size": 2}),
    ],
    ids=str,
)
def test_texts_are_the_same_when_all_ranks_find_their_parts_after_a_restart(
    tmp_path: Path, variant: str, ranks: dict[str, int]
) -> None:
    folder, disk = tmp_path / "model", tmp_path / "disk"
    folder.mkdir()
    architecture, changes = VARIANTS[variant]
    save_tiny_model(folder, architecture, **changes)
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 2, "skip_tokenizer_init": True}
    common |= {"kv_cache_memory": 8_000_000}
    expected = tokens(LLM(str(folder), **common))
    memory = {"kv_host_memory": 16_000_000, "kv_disk_path": str(disk), "kv_disk_size": 64_000_000}
    num_blocks = 0
    for start in range(2):
        llm = LLM(str(folder), **memory, **common, **ranks)
        engine = llm._engine
        engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
        tiers: Any = engine._tiers
        tiers._search.compute_tokens_per_s = 1.0  # so slow that loads always pay
        if start:
            end_s = time.monotonic() + 60
            while len(tiers._disk) < num_blocks:
                tiers.take(0.0, time.monotonic())
                assert time.monotonic() < end_s
        assert tokens(llm) == expected
        while engine.write_behind():
            tiers.wait(1.0)
        stats = engine.stats().kv_tiers.tiers
        assert all((one.mismatches, one.errors) == (0, 0) for one in stats.values())
        assert (stats["disk"].hit_tokens > 100) == bool(start)
        num_blocks = len(tiers._disk)
        tiers._copies.disk._local._folder.release()
        engine._runner.ranks.close()  # type: ignore[attr-defined]  # it has ranks
        del llm, engine, tiers
    assert {path.name for path in disk.glob("engine-0/rank-*")} == {"rank-1"}
