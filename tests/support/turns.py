"""Chooses which of the costliest tests a run with `--turn` takes: an eighth of them, another at another number.

Those are 5 % of the tests and take two thirds of the processors' time. Every other test always runs.
`python -m tests.support.turns RECORD` prints costs.txt from what `pytest --record-costs RECORD` wrote.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

COSTS = Path(__file__).parents[1] / "costs.txt"
HEAD = "# CPU seconds of a case of each test that takes 0.4 or more, in all of its processes, by `make test-costs`."
COSTLY_S = 0.4
TURNS = 8
WHOLE = ("tests/console/", "tests/operator/")
"""Below these, tests of a file go on where the one before ended: a file has its turn as a whole."""


def read_costs(text: str) -> dict[str, float]:
    """Returns CPU seconds of a case by the node id of its function, from lines `SECONDS NODEID`."""
    rows = (line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in rows}


def cpu_seconds() -> float:
    """Returns CPU seconds of this process and of all processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def costs_file(record: str) -> str:
    """Returns the text of costs.txt from lines `SECONDS NODEID`: the mean of each function's cases, if it is large.

    The first and the last test of a file are charged with its fixtures, which others would make and end in their stead:
    they count only where a function has no other case.
    """
    cases: dict[str, list[float]] = defaultdict(list)
    edges: dict[str, list[float]] = defaultdict(list)
    files: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for line in record.splitlines():
        seconds, nodeid = line.split(maxsplit=1)
        files[nodeid.split("::", 1)[0]].append((nodeid.split("[", 1)[0], float(seconds)))
    for tests in files.values():
        for place, (function, cost) in enumerate(tests):
            (edges if place in (0, len(tests) - 1) else cases)[function].append(cost)
    means = {name: sum(found) / len(found) for name, found in (edges | cases).items()}
    rows = [f"{mean:5.1f} {name}" for name, mean in sorted(means.items()) if mean >= COSTLY_S]
    return "\n".join([HEAD, *rows, ""])


def left_out(nodeids: Iterable[str], costs: Mapping[str, float], turn: int) -> set[str]:
    """Returns the node ids that have their turn at another number.

    Units (a case, or a file where its tests depend on each other) are dealt out from the costliest on, so that each
    turn takes about as long. A test without a known cost always runs.
    """
    units: dict[str, list[str]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for nodeid in nodeids:
        path, function = nodeid.split("::", 1)[0], nodeid.split("[", 1)[0]
        unit = path if path.startswith(WHOLE) else nodeid
        units[unit].append(nodeid)
        seconds[unit] += costs.get(function, 0.0)
    costly = sorted((unit for unit in units if seconds[unit]), key=lambda unit: (-seconds[unit], unit))
    return {nodeid for place, unit in enumerate(costly) if (place + turn) % TURNS for nodeid in units[unit]}


if __name__ == "__main__":
    print(costs_file(Path(sys.argv[1]).read_text()), end="")
