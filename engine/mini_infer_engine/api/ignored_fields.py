"""Reports fields of requests that were ignored (`--unknown-fields warn`): in a header of the answer, and in the log."""

import logging
import time
from collections.abc import Callable, Sequence

IGNORED_HEADER = "x-ignored-fields"
"""Header with the names of the fields, with commas between."""
_MAX_NAMES = 20
"""Most names in one header."""
_LOG_PAUSE_S = 10.0
"""Seconds between two lines of the log: clients that send such fields send them with every request."""

logger = logging.getLogger(__name__)


class IgnoredFields:
    """Logs ignored fields, at most one line in `_LOG_PAUSE_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = float("-inf")
        self._unlogged = 0
        """Requests with ignored fields since the last line."""

    def note(self, names: Sequence[str]) -> None:
        """Takes the names of one request's ignored fields."""
        if not names:
            return
        self._unlogged += 1
        now_s = self._clock()
        if now_s < self._next_s:
            return
        shown = header_value(names)
        logger.warning("%d requests had fields that are ignored, the last one: %s", self._unlogged, shown)
        self._next_s, self._unlogged = now_s + _LOG_PAUSE_S, 0


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Returns the header of an answer to a request of which these fields were ignored; no header if there are none."""
    return {IGNORED_HEADER: header_value(names)} if names else {}


def header_value(names: Sequence[str]) -> str:
    """Returns the names as printable ASCII on one line."""
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(_printable(name) for name in names[:_MAX_NAMES]) + more


def _printable(name: str) -> str:
    kept = (character if character.isprintable() and character != "," else "?" for character in name)
    return "".join(kept).encode("ascii", "replace").decode()
