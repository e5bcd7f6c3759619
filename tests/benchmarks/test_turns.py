"""Which engine's turn it is, and that nothing that was measured is lost."""

import sys
import time
from collections.abc import Iterator
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server.dry_server import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common.budget import Budget
from common.isolation import Isolated, IsolationError, isolated
from common.quiet import measuring
from common.together import measure_alternately
from engine_offline import order_of

BOTH = {"start s": [20.0], "w1 tok_s": [100.0]}
RUNS = {"ours": BOTH, "fast 8": BOTH, "slow 8": BOTH | {"w1 tok_s": [50.0]}}


@pytest.mark.parametrize(
    ("round_", "ready", "expected"),
    [
        (0, ["ours", "fast 8", "slow 8"], ["ours", "fast 8", "slow 8"]),
        (1, ["ours", "fast 8", "slow 8"], ["fast 8", "ours"]),  # the slow one is best nowhere
        (2, ["ours", "fast 8", "slow 8"], ["ours", "fast 8"]),
        (2, ["ours", "slow 8"], ["ours"]),  # the fast one has died
    ],
)
def test_engines_take_turns_in_rounds(round_: int, ready: list[str], expected: list[str]) -> None:
    assert order_of(round_, ready, RUNS) == expected


def test_a_first_start_is_skipped_when_too_little_time_is_left() -> None:
    assert Budget(100.0).allows("peer")
    assert not Budget(100.0).allows("peer", 180.0)
    budget = Budget(100.0)
    with budget.spending("peer"):
        pass
    assert budget.allows("peer", 180.0), "it is known to be quick"


def _some_then_none() -> Iterator[dict[str, Any]]:
    yield {"first": 1.0}
    yield {"second": 2.0}
    time.sleep(60)
    yield {"third": 3.0}


def _rounds() -> Iterator[dict[str, Any]]:
    for number in count():
        if number == 3:
            raise ValueError("no third round")
        yield {"round": number}
        yield {}


def test_finished_parts_are_kept_when_the_limit_is_reached() -> None:
    noted: list[dict[str, Any]] = []
    found = isolated(_some_then_none, timeout_s=10.0, note=noted.append)
    assert noted == [{"first": 1.0}, {"second": 2.0}]
    assert "took longer than 10 s" in found["error"]


def test_processes_work_only_when_a_turn_is_sent() -> None:
    with Isolated(_rounds) as one, Isolated(_rounds) as other:
        one.start_step()
        assert list(islice(one.answers(30.0), 1)) == [{"round": 0}]
        for process, number in ((other, 0), (other, 1), (other, 2)):
            assert list(takewhile(bool, process.parts(30.0))) == [{"round": number}]
        with pytest.raises(IsolationError, match="no third round"):
            next(other.parts(30.0))
        assert next(one.parts(30.0)) == {}


def test_quiet_is_signalled_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quiet"
    monkeypatch.setenv("QUIET_FILE", str(file))
    with measuring():
        assert file.exists()
    assert not file.exists()


def waits_for(mine: str, others: str, figures: int) -> Iterator[dict[str, Any]]:
    """Ready once the other one has started, too; fails without figures."""
    Path(mine).touch()
    while not Path(others).exists():
        time.sleep(0.01)
    yield {}
    if not figures:
        raise ValueError("nothing")
    for figure in range(figures):
        yield {"figure": figure, "at": time.monotonic()}


def test_engines_start_together_and_are_measured_one_after_another(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("one", "two")]
    found: dict[str, list[dict[str, Any]]] = {}

    def note(label: str, part: dict[str, Any]) -> None:
        found.setdefault(label, []).append(part)

    starts = {"one": (waits_for, (*files, 2)), "two": (waits_for, (*reversed(files), 2))}
    assert not measure_alternately(starts, 30, note)
    assert [part.get("figure") for part in found["one"]] == [None, 0, 1]
    assert found["one"][-1]["at"] < found["two"][1]["at"]


def test_the_others_are_measured_when_one_fails(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("one", "two")]
    found: list[tuple[str, dict[str, Any]]] = []
    starts = {"one": (waits_for, (*files, 0)), "two": (waits_for, (*reversed(files), 1))}
    (error,) = measure_alternately(starts, 30, lambda label, part: found.append((label, part)))
    assert error == "one: ValueError: nothing"
    assert [label for label, part in found if "figure" in part] == ["two"]
