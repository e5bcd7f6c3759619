"""Folders in memory for local engines: one for each, gone with their service, and found again after its kill."""

from pathlib import Path

import pytest

from mini_infer_operator.local import host_memory


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(host_memory, "MEMORY", folder)
    return folder


def left_by_a_killed_service(state: Path) -> Path:
    folder = Path(host_memory.engine_folder(state, "unified-0"))
    folder.mkdir(parents=True)
    (folder / "a.pool").write_bytes(b"blocks")
    return folder


def test_folder_is_removed_when_the_service_ends(memory: Path, tmp_path: Path) -> None:
    with host_memory.host_memory(tmp_path / "demo"):
        left_by_a_killed_service(tmp_path / "demo")
    assert list(memory.iterdir()) == []


def test_blocks_are_found_again_when_the_same_service_was_killed(memory: Path, tmp_path: Path) -> None:
    folder = left_by_a_killed_service(tmp_path / "demo")
    with host_memory.host_memory(tmp_path / "demo"):
        assert [file.name for file in folder.iterdir()] == ["a.pool"]
        assert host_memory.engine_folder(tmp_path / "other", "unified-0") != str(folder)


def test_folders_of_other_services_are_removed_when_nobody_owns_them(memory: Path, tmp_path: Path) -> None:
    killed = left_by_a_killed_service(tmp_path / "killed")
    (memory / "something else").mkdir()
    with host_memory.host_memory(tmp_path / "alive"):
        alive = left_by_a_killed_service(tmp_path / "alive")
        with host_memory.host_memory(tmp_path / "mine"):
            assert alive.exists()
            assert not killed.exists()
            assert (memory / "something else").exists()


def test_engines_have_no_folder_when_there_is_no_file_system_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "absent")
    with host_memory.host_memory(tmp_path / "demo"):
        assert host_memory.engine_folder(tmp_path / "demo", "unified-0") == ""
