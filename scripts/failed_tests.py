"""Prints the tests that failed in pytest's last run, one node id a line; of those that one fixture's error stopped, the
first: it is one failure.

usage: python scripts/failed_tests.py CACHE, where CACHE is pytest's cache folder
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def first_of_each_cause(failed: Iterable[str], causes: Mapping[str, str]) -> list[str]:
    """Returns the node ids without those whose cause an earlier one has. A test without a known cause is its own."""
    firsts: dict[str, str] = {}
    for name in failed:
        firsts.setdefault(causes.get(name, name), name)
    return list(firsts.values())


def read(path: Path) -> dict[str, str]:
    """Returns the object of a file of pytest's cache, or nothing where there is no such file."""
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    cache = Path(sys.argv[1]) / "v" / "cache"
    print(*first_of_each_cause(read(cache / "lastfailed"), read(cache / "setup_errors")), sep="\n")
