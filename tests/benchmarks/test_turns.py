"""Which engine starts when: what is missing or was cut off comes first, and nothing that was measured is lost."""

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.server.dry_server import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common.budget import Budget
from common.isolation import isolated
from engine_offline import Contender, due

OURS, FAST, SLOW = (Contender(engine, {"max_num_seqs": 8}) for engine in ("ours", "fast", "slow"))
ALL = [OURS, FAST, SLOW]
CUT_OFF = {"start s": [102.0]}
LOADED = {"start s": [20.0], "w1 tok_s": [100.0]}


@pytest.mark.parametrize(
    ("turn", "finished", "wanted"),
    [
        (0, {}, [OURS, FAST, SLOW]),
        (0, {"ours": 1}, [FAST, SLOW]),  # measured before: not again while others are missing
        (0, {"ours": 3, "fast 8": 2, "slow 8": 1}, []),
        (1, {"ours": 1, "fast 8": 1, "slow 8": 1}, [OURS, FAST]),  # the slow one is best nowhere
        (1, {"ours": 2, "fast 8": 1}, [FAST]),
        (2, {"ours": 2, "fast 8": 3}, [OURS]),
    ],
)
def test_who_starts(turn: int, finished: dict[str, int], wanted: list[Contender]) -> None:
    runs = {"ours": LOADED, "fast 8": LOADED, "slow 8": LOADED | {"w1 tok_s": [50.0]}}
    assert due(turn, ALL, runs, finished) == wanted


def test_a_start_that_was_cut_off_is_made_up_for_first() -> None:
    runs = {"ours": LOADED, "fast 8": CUT_OFF}
    assert due(0, [OURS, FAST], runs, {"ours": 1}) == [FAST]


def test_a_first_start_is_given_time_or_left_for_later() -> None:
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


def test_what_was_finished_before_the_limit_is_kept() -> None:
    noted: list[dict[str, Any]] = []
    found = isolated(_some_then_none, timeout_s=10.0, note=noted.append)
    assert noted == [{"first": 1.0}, {"second": 2.0}]
    assert "took longer than 10 s" in found["error"]
