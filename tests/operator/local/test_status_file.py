"""`mini-infer status` and `why` for what `mini-infer up` runs from this folder, without a cluster."""

from pathlib import Path

import pytest

from mini_infer_operator.cli import entry
from mini_infer_operator.local.status_file import is_running, log_tails, read_statuses, write_status
from mini_infer_operator.local.up import _locked
from tests.support.services import VALID


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `mini-infer up` leaves it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    folder = tmp_path / ".mini-infer" / "demo"
    folder.mkdir(parents=True)
    condition = {"type": "Ready", "status": "False", "reason": "Starting", "message": "0 of 2 engines are ready"}
    condition |= {"lastTransitionTime": "2026-01-01T12:00:00Z"}
    write_status(folder, VALID, {"observedGeneration": 1, "conditions": [condition], "model": "demo"})
    (folder / "demo-unified-x-0.log").write_text("loading\nValueError: there is no such folder\n")
    return folder


def test_local_status_shows_a_service_and_its_logs_when_it_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _locked(folder / "lock"):
        assert is_running(folder)
        assert entry.main(["status"]) == 1
        shown = capsys.readouterr().out
        assert "(here)" in shown
        assert "0 of 2 engines are ready" in shown
        assert entry.main(["why", "demo"]) == 1
        shown = capsys.readouterr().out
        assert "Last lines of demo-unified-x-0" in shown
        assert "ValueError: there is no such folder" in shown


def test_local_status_shows_nothing_when_the_service_has_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_running(folder)
    assert read_statuses() == []
    assert entry.main(["status", "--local"]) == 0
    assert "no InferenceService in this folder" in capsys.readouterr().out
    assert entry.main(["status", "nobody", "--local"]) == 2
    assert "no `mini-infer up` of nobody runs from this folder" in capsys.readouterr().err
    assert entry.main(["why", "demo", "--local"]) == 2
    assert "no `mini-infer up` of demo runs from this folder" in capsys.readouterr().err
    assert entry.main(["why", "demo"]) == 2
    assert "set KUBECONFIG" in capsys.readouterr().err


def test_log_tails_have_the_last_lines_of_each_engine(folder: Path) -> None:
    assert log_tails(folder, 1) == {"demo-unified-x-0": "ValueError: there is no such folder"}
