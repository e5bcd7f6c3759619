"""One log line for each kind of refusal and peer, then a count once a minute: hostile clients fill no disk."""

import logging
from collections import Counter

INTERVAL_S = 60.0
MAX_KINDS = 1024
"""Most pairs of kind and peer that are counted apart within one interval; all others are counted together."""
OTHERS = "other addresses"

log = logging.getLogger(__name__)


class RefusalLog:
    """The refusals of one server that never become requests, and so have no line in the access log."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()
        self._began_s: float | None = None

    def note(self, kind: str, peer: str, message: str) -> None:
        """Logs the first of this kind and peer in an interval, and counts the others."""
        if (kind, peer) not in self._seen and len(self._seen) >= MAX_KINDS:
            peer = OTHERS
        self._seen[kind, peer] += 1
        if self._seen[kind, peer] == 1:
            log.warning("%s of %s: %s", kind, peer, message)

    def look(self, now_s: float) -> None:
        """Logs the counts of an interval that is over."""
        if not self._seen:
            return
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._began_s >= INTERVAL_S:
            for (kind, peer), count in self._seen.items():
                if count > 1:
                    log.warning("%s of %s: %d more in %.0f s", kind, peer, count - 1, now_s - self._began_s)
            self._seen.clear()
            self._began_s = None
