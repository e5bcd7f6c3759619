"""The file of a shared pool: who may use it, when its contents are new, and what it refuses."""

import os
from pathlib import Path

import pytest

from mini_infer_engine.kv_host import pool_file
from mini_infer_engine.kv_host.open_pool import anonymous_pool, is_in_memory, open_pool
from mini_infer_engine.kv_host.pool_file import PoolLayout
from tests.engine.kv_host.pools import IDENTITY, PAGE_BYTES, open_index, open_test_pool, store


def test_pool_fits_into_its_size() -> None:
    for num_bytes in (24_000, 1 << 20, 64 << 30):
        layout = PoolLayout.within(num_bytes, PAGE_BYTES, 1600, IDENTITY)
        assert layout.file_bytes <= num_bytes < layout.file_bytes + 2 * (PAGE_BYTES + 4096)
        assert layout.pages_at % 4096 == 0
        assert PoolLayout.of_header(layout.header()) == layout
    with pytest.raises(ValueError, match="8,192"):
        PoolLayout.within(8192, PAGE_BYTES, 1600, IDENTITY)


def test_contents_survive_when_the_last_engine_has_ended(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    store(index, 1)
    index._file.close()
    assert len(open_index(tmp_path)) == 1


@pytest.mark.parametrize("damage", [b"", b"NOTAPOOL", None])
def test_contents_are_new_when_the_file_is_no_pool_or_cut_short(tmp_path: Path, damage: bytes | None) -> None:
    index = open_index(tmp_path)
    store(index, 1)
    index._file.close()
    with index._file.path.open("r+b") as file:
        file.write(damage or b"")
        file.truncate(index._file.layout.file_bytes if damage else 100)
    assert len(open_index(tmp_path)) == 0


def test_pool_of_another_size_is_shared_while_it_is_used_and_replaced_afterwards(tmp_path: Path) -> None:
    one = open_test_pool(tmp_path, 8)
    other = open_pool(str(tmp_path), 1 << 20, PAGE_BYTES, 16, IDENTITY)
    assert (other.layout, other.row) == (one.layout, 1)
    for file in (one, other):
        file.close()
    assert open_pool(str(tmp_path), 1 << 20, PAGE_BYTES, 16, IDENTITY).layout.num_slots > 8


def test_pools_of_other_models_are_removed_when_nobody_uses_them(tmp_path: Path) -> None:
    ended, used = open_test_pool(tmp_path, identity="b" * 64), open_test_pool(tmp_path, identity="c" * 64)
    ended.close()
    (tmp_path / "somebody's.pool").write_text("this is no pool of ours")
    mine = open_test_pool(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {used.path.name, mine.path.name, "somebody's.pool"}


def test_file_is_empty_again_when_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        open_pool(str(tmp_path), 1 << 20, PAGE_BYTES, 16, IDENTITY)
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [0]


def test_engine_is_refused_when_all_rows_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_file, "MOST_ROWS", 2)
    files = [open_test_pool(tmp_path) for _ in range(2)]
    assert [file.row for file in files] == [0, 1]
    assert [files[0].is_alive(row) for row in range(2)] == [False, True]  # its own lock is not another's
    with pytest.raises(OSError, match="2 engines"):
        open_test_pool(tmp_path)


@pytest.mark.parametrize(
    ("path", "is_memory"),
    [("/dev/shm/kv", True), ("/dev/other", False), ("/mnt/kv", True), ("/mnt/kv/a", True), ("/home/kv", False)],
)
def test_file_system_of_a_path_is_found_among_mounts(path: str, is_memory: bool) -> None:
    mounts = (
        "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n/dev/vdb /mnt ext4 rw 0 0\ntmpfs /mnt/kv tmpfs rw 0 0\n"
    )
    assert is_in_memory(Path(path), mounts) == is_memory
    assert is_in_memory(Path(path), "")


def test_anonymous_pool_is_opened_by_its_path() -> None:
    file, path = anonymous_pool()
    one, other = (open_pool(path, 1 << 20, PAGE_BYTES, 16, IDENTITY) for _ in range(2))
    os.close(file)
    assert (one.row, other.row) == (0, 1)
    one.pages[5] = 7
    assert other.pages[5] == 7
