"""How long a script may go on: it begins nothing that it could not end, and still writes what it has."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.report import log_line


class Budget:
    """Seconds for a whole script. A part is expected to take as long as the longest of its kind, or else of any."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self._longest_s: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        """Seconds until the limit, at least one: a deadline for what begins now."""
        return max(1.0, self._end - time.monotonic())

    def allows(self, kind: str, first_s: float = 0.0) -> bool:
        """Whether another part of this kind should end in time; the first of a kind may take `first_s`, or longer."""
        needed_s = self._longest_s.get(kind, max((first_s, *self._longest_s.values())))
        left_s = self._end - time.monotonic()
        if needed_s < left_s:
            return True
        log_line(f"{kind}: left out, it may take {needed_s:.0f} s of {max(0.0, left_s):.0f}")
        return False

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """A part of this kind runs inside."""
        begin = time.monotonic()
        yield
        self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), time.monotonic() - begin)
