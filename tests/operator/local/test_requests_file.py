"""`mini-infer rollout` promotes, aborts and pauses a canary of `mini-infer up` in this folder, without a cluster."""

from pathlib import Path
from typing import Any

import pytest

from mini_infer_operator.canary.state import CanaryState
from mini_infer_operator.cli import entry
from mini_infer_operator.local.requests_file import Requests, read_requests
from mini_infer_operator.local.status_file import write_status
from mini_infer_operator.local.up import _locked
from tests.support.services import VALID


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    folder = tmp_path / ".mini-infer" / "demo"
    folder.mkdir(parents=True)
    return folder


def with_canary(folder: Path, phase: Any) -> None:
    state = CanaryState(phase, "new", "old", 1, 4, requests=7, errors=1, divergence=0.05, replays=3, message="step 2")
    canary = state.status().model_dump(by_alias=True, exclude_none=True)
    write_status(folder, VALID, {"observedGeneration": 1, "conditions": [], "canary": canary})


@pytest.mark.parametrize(
    ("phase", "verb", "requests"),
    [
        ("Running", "promote", Requests({"serving.mini-infer.io/promote": "new"})),
        ("Running", "abort", Requests({"serving.mini-infer.io/abort": "new"})),
        ("RolledBack", "promote", Requests({"serving.mini-infer.io/promote": "new"})),
        ("RolledBack", "abort", None),
        ("Promoted", "promote", None),
        ("Running", "pause", Requests(paused=True)),
        ("Running", "resume", Requests(paused=False)),
    ],
)
def test_verbs_of_a_local_rollout(folder: Path, phase: str, verb: str, requests: Requests | None) -> None:
    with_canary(folder, phase)
    with _locked(folder / "lock"):
        assert entry.main(["rollout", verb, "demo"]) == (2 if requests is None else 0)
    assert read_requests(folder) == (requests or Requests())


def test_status_shows_the_figures_of_a_canary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_canary(folder, "Running")
    with _locked(folder / "lock"):
        entry.main(["status", "demo", "--local"])
    assert "canary new beside old: step 2 (7 requests, 1 failed, 3 answers differ by 0.0500" in capsys.readouterr().out


def test_no_requests_are_read_when_the_file_is_something_else(folder: Path) -> None:
    (folder / "requests.json").write_text("{]")
    assert read_requests(folder) == Requests()
