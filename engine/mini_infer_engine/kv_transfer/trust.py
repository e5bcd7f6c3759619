"""Decides from which engines keys and values are no longer taken: those that have sent wrong bytes three times."""

import logging
from collections import Counter

MOST_MISMATCHES = 3
"""Transfers with a wrong digest after which nothing more is requested from an engine."""
MOST_SOURCES = 256
"""The most addresses that are counted one by one. Engines come and go, and metrics must not grow with them."""
OTHER_SOURCES = "other"

log = logging.getLogger(__name__)


class Trust:
    """Counts the transfers of each engine whose digest was wrong."""

    def __init__(self) -> None:
        self.by_source: Counter[str] = Counter()
        """Mismatches by the address of the engine, for metrics."""
        self._by_engine: dict[str, int] = {}
        """Mismatches by the id of an engine, which is new at each start: the latest MOST_SOURCES engines."""

    def distrusts(self, engine_id: str) -> bool:
        """Returns True if nothing should be requested from this engine."""
        return self._by_engine.get(engine_id, 0) >= MOST_MISMATCHES

    def mismatch(self, address: str, engine_id: str) -> None:
        """Counts and logs a transfer whose digest was wrong. The third one of an engine ends its trust."""
        is_counted = address in self.by_source or len(self.by_source) < MOST_SOURCES
        self.by_source[address if is_counted else OTHER_SOURCES] += 1
        count = self._by_engine.pop(engine_id, 0) + 1
        self._by_engine[engine_id] = count
        while len(self._by_engine) > MOST_SOURCES:
            del self._by_engine[next(iter(self._by_engine))]
        log.error(
            "KV transfer: what came from %s (%s) has a wrong digest; the prompt is computed here", address, engine_id
        )
        if count == MOST_MISMATCHES:
            log.error(
                "KV transfer: nothing more is requested from %s (%s), which has sent wrong bytes %d times: restart one "
                "of the engines once its memory and the link are known to be sound",
                address,
                engine_id,
                count,
            )
