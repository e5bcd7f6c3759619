"""Every test has its turn, and turns take about as long."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.turns import COSTLY_S, COSTS, TURNS, costs_file, left_out, read_costs

ROOT = Path(__file__).parents[1]
NODEIDS = [
    "tests/engine/test_a.py::test_costly[1]",
    "tests/engine/test_a.py::test_costly[2]",
    "tests/engine/test_a.py::test_costly[3]",
    "tests/engine/test_a.py::test_cheap",
    "tests/operator/test_b.py::test_first",
    "tests/operator/test_b.py::test_then",
    "tests/web/test_c.py::test_slow",
]
TABLE = {
    "tests/engine/test_a.py::test_costly": 5.0,
    "tests/operator/test_b.py::test_first": 9.0,
    "tests/web/test_c.py::test_slow": 2.0,
}


def test_each_costly_test_runs_in_one_of_all_turns() -> None:
    runs = [nodeid for turn in range(TURNS) for nodeid in set(NODEIDS) - left_out(NODEIDS, TABLE, turn)]
    costly = [nodeid for nodeid in NODEIDS if "cheap" not in nodeid]
    assert sorted(runs) == sorted([*costly, *TURNS * ["tests/engine/test_a.py::test_cheap"]])


@pytest.mark.parametrize("turn", range(TURNS))
def test_a_files_tests_stay_together_when_they_depend_on_each_other(turn: int) -> None:
    out = left_out(NODEIDS, TABLE, turn)
    assert len(out & {"tests/operator/test_b.py::test_first", "tests/operator/test_b.py::test_then"}) in (0, 2)


def test_turns_take_about_as_long_when_costs_differ() -> None:
    costs = {f"tests/web/test_x.py::test_{number}": 1.0 + number % 7 for number in range(200)}
    left = [sum(costs[nodeid] for nodeid in left_out(costs, costs, turn)) for turn in range(TURNS)]
    assert max(left) - min(left) <= max(costs.values())


def test_recorded_costs_name_seconds_when_they_are_read() -> None:
    costs = read_costs(COSTS.read_text())
    assert costs
    assert all(seconds >= COSTLY_S for seconds in costs.values())
    assert list(costs) == sorted(costs)


def test_recorded_tests_exist() -> None:
    recorded = [nodeid.split("::")[:2] for nodeid in read_costs(COSTS.read_text())]
    files = {path: file.read_text() for path, _ in recorded if (file := ROOT / path).exists()}
    assert [f"{path}::{name}" for path, name in recorded if not re.search(rf"\b{name}\b", files.get(path, ""))] == []


def test_a_function_costs_what_its_cases_take_when_others_make_and_end_the_files_fixtures() -> None:
    record = ["9.00 a.py::first", "0.70 a.py::both[1]", "0.10 a.py::cheap", "8.00 a.py::both[2]", "3.00 b.py::alone"]
    assert read_costs(costs_file("\n".join(record))) == {"a.py::both": 0.7, "a.py::first": 9.0, "b.py::alone": 3.0}


def test_a_costly_test_is_chosen_at_any_turn_when_it_failed_and_runs_once_more(tmp_path: Path) -> None:
    """Turns are dealt out among all tests: a failed one that is collected alone would have turn 0."""
    failed = "tests/test_flakes.py::test_a_name_is_kept_when_its_test_passes_the_second_time"
    assert failed in read_costs(COSTS.read_text())
    record = tmp_path / "v" / "cache" / "lastfailed"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({failed: True}))
    arguments = ["--turn", "3", "--last-failed", "--collect-only", "-q", "-o", f"cache_dir={tmp_path}"]
    collected = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert collected.stdout.splitlines()[0] == failed
