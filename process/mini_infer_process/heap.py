"""Returns free memory of the C heap to the kernel.

glibc retains memory that is freed between two blocks that are in use. On other C libraries nothing happens.
"""

import contextlib
import ctypes

TRIM_EVERY_S = 60.0
"""Seconds between two trims: each reads the whole heap, some milliseconds, for which an idle process has time once a
minute.
"""


def trim_heap() -> None:
    """Returns free pages to the kernel, see malloc_trim(3)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class HeapTrimmer:
    """Trims the heap of a process that lasts, at most once in `TRIM_EVERY_S`."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def trim_if_due(self, now_s: float) -> bool:
        """Trims the heap unless it was trimmed lately. Returns True if it did. `now_s` is a monotonic time."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + TRIM_EVERY_S
        trim_heap()
        return True
