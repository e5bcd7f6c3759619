"""Reads how much anonymous main memory processes have: heaps and stacks, without files that are mapped.

A model that is mapped from its file counts as resident memory page by page as it is read, which is no growth of what a
program allocates. Systems without /proc report nothing.
"""

import re
from collections.abc import Sequence
from pathlib import Path

READ_EVERY_S = 1.0
"""Seconds for which a reading is reused: load reports are more frequent than memory changes."""
_ANONYMOUS = re.compile(rb"^RssAnon:\s+(\d+) kB", re.MULTILINE)


def anonymous_bytes(pid: int) -> int:
    """Returns the anonymous resident memory of a process; 0 if it has ended or the system does not report it."""
    try:
        found = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


class AnonymousMemory:
    """The anonymous memory of some processes together, read again at most once a second."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self._read_s = float("-inf")
        self._bytes = 0

    def bytes_at(self, now_s: float) -> int:
        """Returns the bytes at the time `now_s`, which is at most a second old."""
        if now_s - self._read_s >= READ_EVERY_S:
            self._read_s, self._bytes = now_s, sum(map(anonymous_bytes, self._pids))
        return self._bytes
