import os
from pathlib import Path

import pytest

from mini_infer_contract.launch import MODEL_MANIFEST
from mini_infer_engine.server.model_lock import locked_model
from mini_infer_engine.tools.fetch import neighbours

NAMES = ("0" * 16, "1" * 16, "2" * 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a new model, beside three that were used an hour ago, the first one least recently."""
    for age_s, name in zip((3800, 3700, 3600), NAMES, strict=True):
        (tmp_path / name).mkdir()
        manifest = tmp_path / name / MODEL_MANIFEST
        manifest.write_text("{}")
        used_s = manifest.stat().st_mtime - age_s
        os.utime(manifest, (used_s, used_s))
    for other in ("lost+found", "3" * 16):  # no model, and one that is being filled
        (tmp_path / other).mkdir()
    return tmp_path / ("f" * 16)


def free(monkeypatch: pytest.MonkeyPatch, folder: Path, *, gained: int) -> None:
    """Has each deleted model free so many bytes."""
    monkeypatch.setattr(
        neighbours.shutil,
        "disk_usage",
        lambda _: _Usage(gained * (5 - len(list(folder.parent.iterdir())))),
    )


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(("needed", "deleted"), [(0, 0), (1, 1), (10, 1), (11, 2), (99, 3)])
def test_the_least_recently_used_models_are_deleted_when_a_copy_needs_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, needed: int, deleted: int
) -> None:
    free(monkeypatch, folder, gained=10)
    assert neighbours.make_room(folder, needed) == list(NAMES[:deleted])
    assert {f.name for f in folder.parent.iterdir()} == {"lost+found", "3" * 16, *NAMES[deleted:]}


def test_a_model_stays_when_an_engine_reads_it_or_a_pod_has_just_found_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, folder, gained=10)
    neighbours.touch(folder.parent / NAMES[1])
    with locked_model(str(folder.parent / NAMES[0])), locked_model(str(folder.parent / NAMES[0])):
        assert neighbours.make_room(folder, 99) == [NAMES[2]]
    assert neighbours.make_room(folder, 99) == [NAMES[0]]


@pytest.mark.parametrize("model", ["demo", "organisation/name", "/not/there"])
def test_nothing_is_locked_when_the_model_was_not_copied(model: str) -> None:
    with locked_model(model):
        pass


def test_an_engine_starts_when_its_model_cannot_be_locked(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    with locked_model(str(folder.parent / NAMES[0])):
        assert "No locks available" in caplog.text
