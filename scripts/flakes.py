"""Decides whether the tests that passed only in their second run fail CI: a pure verdict over a history of runs.

The history is tests/flakes.txt: one line a run, newest last, with date, commit and node ids between tabs. It knows
neither pytest nor git; `main` reads and writes the files.
usage: python scripts/flakes.py HISTORY DATE COMMIT NAMES, where the file NAMES has one node id a line
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

WINDOW_RUNS = 3
"""Runs that count, this one included."""
MAX_RUNS_OF_A_TEST = 1
"""Runs of the window in which one test may need its second run."""
MAX_TESTS_OF_A_RUN = 3
"""Tests that may need their second run in one run of CI."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of CI, and the node ids of the tests that failed first and then passed alone."""

    date: str
    commit: str
    names: tuple[str, ...]


def parse_history(text: str) -> list[Run]:
    """Returns the runs of a history. Raises ValueError with the line's number if a line has no commit."""
    runs = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        date, *rest = line.split("\t")
        if not rest:
            raise ValueError(f"line {number} is {line!r}: expected DATE, COMMIT and node ids with tabs between them")
        runs.append(Run(date, rest[0], tuple(rest[1:])))
    return runs


def format_run(run: Run) -> str:
    """Returns the run's line of a history."""
    return "\t".join([run.date, run.commit, *run.names]) + "\n"


def is_recorded(history: Sequence[Run], run: Run) -> bool:
    """Returns True if the run belongs into the history: it has names, or moves the window on past runs that have."""
    return bool(run.names) or any(before.names for before in history[-WINDOW_RUNS + 1 :])


def faults(history: Sequence[Run], run: Run) -> list[str]:
    """Returns why CI fails, one sentence a reason. The list is empty if it passes.

    The cases of a parametrised test are one test where runs are counted, and several where tests are.
    """
    found = []
    if len(run.names) > MAX_TESTS_OF_A_RUN:
        found.append(f"{len(run.names)} tests needed a second run, and at most {MAX_TESTS_OF_A_RUN} may")
    window = [*history[-WINDOW_RUNS + 1 :], run]
    counts = Counter(name for each in window for name in functions(each.names))
    found += [
        f"{name} needed a second run in {count} of the last {len(window)} runs: mend it"
        for name, count in counts.items()
        if count > MAX_RUNS_OF_A_TEST
    ]
    return found


def functions(names: Iterable[str]) -> list[str]:
    """Returns the test functions of node ids, each once."""
    return list(dict.fromkeys(name.partition("[")[0] for name in names))


def main(history_path: str, date: str, commit: str, names_path: str) -> int:
    """Adds this run to the history, prints the verdict and returns the exit status."""
    history_file = Path(history_path)
    text = history_file.read_text()
    history = parse_history(text)
    run = Run(date, commit, tuple(dict.fromkeys(Path(names_path).read_text().splitlines())))
    if is_recorded(history, run):
        history_file.write_text(text + format_run(run))
    print(f"=== {len(run.names)} tests needed a second run")
    for name in run.names:
        print(f"  {name}")
    if run.names:
        print(f"  commit the line that {history_path} has for this run, or mend the tests")
    reasons = faults(history, run)
    for reason in reasons:
        print(f"FAILED: {reason}")
    return 1 if reasons else 0


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
