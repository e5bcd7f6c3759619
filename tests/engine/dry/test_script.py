from pathlib import Path

import pytest

from mini_infer_engine.dry.script import Reply, read_script, reply_for
from mini_infer_engine.server.cli import main


def test_the_first_matching_reply_is_used() -> None:
    script = (Reply("b", when="B"), Reply("a", when="A"), Reply("else"))
    assert [reply_for(prompt, script) for prompt in ("A", "AB", "C")] == ["a", "b", "else"]
    assert reply_for("C", script[:2]) is None


def test_a_script_is_read_and_refused_when_it_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.json"
    path.write_text('[{"when": "A", "say": "a"}, {"say": "b"}]')
    assert read_script(path) == (Reply("a", when="A"), Reply("b"))
    path.write_text('[{"when": "A", "says": "a"}]')
    assert main(["--dry-run", "--port=0", f"--dry-run-script={path}"]) == 1
    reported = capsys.readouterr().err
    assert "--dry-run-script" in reported
    assert str(path) in reported
    assert "says" in reported
    assert len(reported.splitlines()) == 1


def test_a_script_is_refused_when_there_is_no_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--dry-run-script=x.json"])
    assert "--dry-run-script is for --dry-run" in capsys.readouterr().err
