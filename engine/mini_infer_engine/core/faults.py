"""Exceptions that cost one message or one job and not the process: they are counted, and logged now and then."""

import logging
import time

import msgspec

_EVERY_S = 10.0
"""Seconds between two log lines about one place: a peer that causes faults must not fill the disk with them."""
_MAX_PLACES = 1000
"""Most places that are remembered: they name peers, which come and go."""

logger = logging.getLogger(__name__)


class FaultLog:
    """Counts the faults of one component. Not thread-safe: each thread has its own."""

    def __init__(self) -> None:
        self.num_faults = 0
        self._logged_s: dict[str, float] = {}

    def record(self, place: str, error: BaseException) -> None:
        """Counts an exception and logs it, at most once in ten seconds for each place.

        A message that cannot be decoded is its sender's fault and gets one line; anything else gets its traceback.
        """
        self.num_faults += 1
        now_s = time.monotonic()
        if now_s - self._logged_s.get(place, -_EVERY_S) < _EVERY_S:
            return
        if len(self._logged_s) >= _MAX_PLACES:
            self._logged_s.clear()
        self._logged_s[place] = now_s
        if isinstance(error, msgspec.MsgspecError | UnicodeError | RecursionError):
            logger.warning("KV transfer: %s fails (fault %d): %s", place, self.num_faults, error)
        else:
            logger.error("KV transfer: %s fails (fault %d); all else goes on", place, self.num_faults, exc_info=error)
