"""Gives free memory of the C heap back to the kernel. glibc keeps what is freed between two blocks that are in use.

Servers, whose large blocks are requests' bodies, map these apart from the heap. Cores, which allocate large blocks all
the time, trim their heap instead. On other C libraries nothing happens.
"""

import contextlib
import ctypes

TRIM_EVERY_S = 60.0
"""A trim reads the whole heap: some milliseconds, for which an idle process has time once a minute."""
MIN_FREE_BYTES = 64 << 20
"""A busy process trims its heap only if at least this much of it is free."""
LARGE_BLOCK_BYTES = 1 << 20
"""A server maps blocks of this size and more, so that they go back to the kernel as soon as they are freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_TRIM_THRESHOLD_BYTES = 8 << 20


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2`, see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def map_large_blocks() -> None:
    """Has large blocks of this process mapped apart from the heap from now on, and free memory at its end given back.

    Otherwise glibc raises its threshold to the largest block freed so far, up to 32 MiB: later blocks of that size are
    then in the heap, which keeps them when they are freed.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def trim_heap() -> None:
    """Returns free pages to the kernel, see malloc_trim(3)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def free_heap_bytes() -> int:
    """Returns the bytes of the heap that are free, or 0 if the C library does not say."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    mallinfo.restype = _MallocInfo
    return int(mallinfo().fordblks)


class HeapTrimmer:
    """Trims the heap of a process that lasts, at most once in `TRIM_EVERY_S`."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def trim_if_due(self, now_s: float, *, is_idle: bool) -> bool:
        """Trims the heap unless it was trimmed lately, or the process is busy and little is free.

        Returns True if it did. `now_s` is a monotonic time in seconds.
        """
        if now_s < self._next_s:
            return False
        self._next_s = now_s + TRIM_EVERY_S
        if not is_idle and free_heap_bytes() < MIN_FREE_BYTES:
            return False
        trim_heap()
        return True
