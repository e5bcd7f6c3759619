"""Which second runs fail CI, and what a run leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.failed_tests import first_of_each_cause
from scripts.flakes import Run, faults, format_run, is_recorded, main, parse_history

ROOT = Path(__file__).parents[1]
A, B, C = "tests/a.py::test_a", "tests/b.py::test_b", "tests/c.py::test_c"


def run_of(*names: str) -> Run:
    return Run("2026-11-28", "abc1234", names)


QUIET = run_of()


@pytest.mark.parametrize(
    ("history", "run", "expected"),
    [
        pytest.param([], QUIET, [], id="nothing ever"),
        pytest.param([], run_of(A), [], id="once"),
        pytest.param([], run_of(A, B, C), [], id="three at once"),
        pytest.param([], run_of(A, B, C, f"{A}2"), ["4 tests"], id="four at once"),
        pytest.param([], run_of(*(f"{A}[{case}]" for case in range(4))), ["4 tests"], id="four cases of one test"),
        pytest.param([run_of(A)], run_of(A), [A], id="twice in a row"),
        pytest.param([run_of(A), QUIET], run_of(A), [A], id="two of three"),
        pytest.param([run_of(A), QUIET, QUIET], run_of(A), [], id="two of four"),
        pytest.param([run_of(A), run_of(B)], run_of(C), [], id="different tests"),
        pytest.param([run_of(f"{A}[1]")], run_of(f"{A}[2]"), [A], id="two cases of one test"),
        pytest.param([run_of(A), run_of(A)], QUIET, [A], id="two runs that landed beside each other"),
        pytest.param([run_of(A, B)], run_of(B, A), [A, B], id="two tests twice"),
    ],
)
def test_ci_fails_when_tests_need_second_runs_too_often(history: list[Run], run: Run, expected: list[str]) -> None:
    found = faults(history, run)
    assert len(found) == len(expected)
    for reason, part in zip(found, expected, strict=True):
        assert reason.startswith(part)


@pytest.mark.parametrize(
    ("history", "run", "recorded"),
    [
        ([], QUIET, False),
        ([], run_of(A), True),
        ([run_of(A)], QUIET, True),
        ([run_of(A), QUIET], QUIET, True),
        ([run_of(A), QUIET, QUIET], QUIET, False),
    ],
)
def test_a_run_is_recorded_when_it_moves_the_window(history: list[Run], run: Run, recorded: bool) -> None:
    assert is_recorded(history, run) is recorded


def test_runs_are_read_as_they_were_written_when_names_have_blanks() -> None:
    runs = [run_of(f"{A}[a b]", B), QUIET]
    assert parse_history("# comment\n\n" + "".join(map(format_run, runs))) == runs


def test_the_line_is_named_when_a_history_is_malformed() -> None:
    with pytest.raises(ValueError, match="line 2"):
        parse_history("# comment\n2026-11-28 abc1234\n")


def test_the_history_of_this_repository_is_readable() -> None:
    parse_history((ROOT / "tests" / "flakes.txt").read_text())


@pytest.mark.parametrize(("count", "status"), [(0, 0), (1, 0), (4, 1)])
def test_names_are_printed_and_kept_when_ci_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, status: int
) -> None:
    names = [f"{A}{number}" for number in range(count)]
    history, found = tmp_path / "flakes.txt", tmp_path / "names"
    history.write_text("# comment\n")
    found.write_text("".join(f"{name}\n" for name in names))
    assert main(str(history), "2026-11-28", "abc1234", str(found)) == status
    assert [run.names for run in parse_history(history.read_text())] == ([tuple(names)] if names else [])
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert ("FAILED" in printed) is bool(status)


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        pytest.param({}, [A, B, C], id="tests that failed"),
        pytest.param({A: "port taken", C: "port taken"}, [A, B], id="a fixture's error and a test"),
        pytest.param({A: "port taken", C: "no disk"}, [A, B, C], id="errors of two fixtures"),
        pytest.param({"tests/d.py::test_d": "port taken"}, [A, B, C], id="of tests that did not fail"),
    ],
)
def test_tests_count_once_when_one_fixtures_error_stopped_them(causes: dict[str, str], expected: list[str]) -> None:
    assert first_of_each_cause([A, B, C], causes) == expected


def run_twice(folder: Path, body: str) -> tuple[int, list[str]]:
    """Runs pytest_again.sh on one file. Returns its exit status and the names that it kept."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(f"from pathlib import Path\n\n{body}")
    names = folder / "names"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"SECOND_RUNS": str(names), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ("-p", "xdist", "-p", "tests.support.setup_errors")
    ended = subprocess.run(
        [ROOT / "scripts" / "pytest_again.sh", sys.executable, "-q", *plugins, "test_it.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
    )
    return ended.returncode, names.read_text().splitlines() if names.exists() else []


def test_a_name_is_kept_when_its_test_passes_the_second_time(tmp_path: Path) -> None:
    """A name of an earlier session must not enter the record."""
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{"test_it.py::test_good": true}')
    body = (
        "def test_flaky():\n    seen = Path('seen').exists()\n    Path('seen').touch()\n    assert seen\n"
        "def test_good():\n    pass\n"
    )
    assert run_twice(tmp_path, body) == (0, ["test_it.py::test_flaky"])


def test_one_name_is_kept_when_a_fixture_of_several_tests_fails_the_first_time(tmp_path: Path) -> None:
    body = (
        "import pytest\n\n@pytest.fixture(scope='module')\ndef place():\n    seen = Path('seen').exists()\n"
        "    Path('seen').touch()\n    assert seen\n\n"
        "def test_one(place):\n    pass\n\ndef test_other(place):\n    pass\n"
    )
    assert run_twice(tmp_path, body) == (0, ["test_it.py::test_one"])


def test_no_name_is_kept_when_a_test_fails_each_time(tmp_path: Path) -> None:
    assert run_twice(tmp_path, "def test_bad():\n    assert 0\n") == (1, [])
