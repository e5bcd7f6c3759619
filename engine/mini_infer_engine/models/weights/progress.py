"""Reports how far the weights are loaded: bytes, bytes a second and seconds that remain. It reads no file."""

import logging
import sys
import time
from collections.abc import Callable
from threading import Lock

from tqdm import tqdm

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Seconds between lines in the log: a load of a few seconds has its last line alone."""


class LoadProgress:
    """Counts the bytes of tensors that several threads load. A terminal shows a bar; a log gets a line now and then."""

    def __init__(
        self, total_bytes: int, clock: Callable[[], float] = time.monotonic, *, shows_bar: bool | None = None
    ) -> None:
        """`shows_bar` None: on a terminal alone."""
        self._total, self._done, self._clock = total_bytes, 0, clock
        self._begin = self._last_line = clock()
        self._lock = Lock()
        self._shows_bar = sys.stderr.isatty() if shows_bar is None else shows_bar
        self._bar = tqdm(total=total_bytes, desc="weights", unit="B", unit_scale=True, disable=not self._shows_bar)

    def add(self, num_bytes: int) -> None:
        """Counts a tensor that is loaded."""
        with self._lock:
            self._done += num_bytes
            self._bar.update(num_bytes)
            now = self._clock()
            if self._shows_bar or now - self._last_line < INTERVAL_S or self._done >= self._total:
                return
            self._last_line = now
            line = progress_line(self._done, self._total, now - self._begin)
        log.info("weights: %s", line)

    def close(self) -> None:
        """Ends the bar, and reports the load if it is complete."""
        self._bar.close()
        elapsed_s = self._clock() - self._begin
        if self._done >= self._total:
            log.info("weights: %s loaded in %.1f s%s", gigabytes(self._done), elapsed_s, _speed(self._done, elapsed_s))


def progress_line(done: int, total: int, elapsed_s: float) -> str:
    """Returns a line such as `31.4 of 140.1 GB, 2.1 GB/s, 52 s remaining`, by the speed up to now."""
    if not done or elapsed_s <= 0:
        return f"0 of {gigabytes(total)}"
    remaining_s = (total - done) * elapsed_s / done
    return f"{done / 1e9:.1f} of {gigabytes(total)}{_speed(done, elapsed_s)}, {remaining_s:.0f} s remaining"


def gigabytes(num_bytes: int) -> str:
    """Returns a size in GB, with two digits more if it is small."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e9:.3f} GB"


def _speed(done: int, elapsed_s: float) -> str:
    return f", {done / 1e9 / elapsed_s:.1f} GB/s" if elapsed_s > 0 else ""
