"""Every test has its turn, and turns take about as long."""

import pytest

from tests.support.turns import COSTS, TURNS, left_out, read_costs

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
    assert all(seconds >= 1 for seconds in costs.values())
    assert list(costs) == sorted(costs)
