"""The start of the tier on a disk says what is wrong with its folder, and what will be."""

import errno
import logging
from pathlib import Path

import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMemory
from mini_infer_engine.core_process import disk_tier
from mini_infer_engine.core_process.disk_tier import open_disk
from mini_infer_engine.kv_disk.disk_store import DiskStore
from tests.engine.runtime.test_page_format import POOLS, filled, host_tier_of


def opened(path: Path, size: int = 64 << 20) -> DiskMemory | None:
    settings = EngineSettings(model="demo", kv_host_memory=1 << 20, kv_disk_path=str(path), kv_disk_size=size)
    host = host_tier_of(filled(POOLS["float32"]))

    def spread(store: DiskStore, identity: str) -> DiskStore:
        del identity
        return store

    return open_disk(settings, host, 16, "cpu", spread)


@pytest.mark.parametrize(("size", "warns"), [(64 << 20, False), (1 << 60, True)])
def test_a_warning_names_the_room_when_the_file_system_has_less_than_the_tier_may_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, warns: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        opened(tmp_path, size)
    assert ["--kv-disk-size" in record.getMessage() for record in caplog.records] == ([True] if warns else [])


def test_the_target_is_named_when_the_folder_is_a_link_to_nothing(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("gone")
    with pytest.raises(ValueError, match="--kv-disk-path") as refused:
        opened(link)
    assert "gone, which does not exist" in str(refused.value)


def failing_folder(number: int) -> type:
    class Folder:
        def __init__(self, path: Path, identity: str) -> None:
            del identity
            raise OSError(number, "the reason", str(path))

    return Folder


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_the_tier_is_off_from_the_start_when_its_disk_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(disk_tier, "DiskFolder", failing_folder(number))
    disk = opened(tmp_path)
    assert disk is not None
    assert "the reason" in disk.fault
    assert (disk.capacity_bytes, disk.used_bytes, disk.take_recovered()) == (0, 0, [])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR])
def test_the_start_is_refused_when_the_folder_is_the_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(disk_tier, "DiskFolder", failing_folder(number))
    with pytest.raises(ValueError, match="--kv-disk-path"):
        opened(tmp_path)
