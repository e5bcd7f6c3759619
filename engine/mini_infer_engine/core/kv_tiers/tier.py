"""Counts what one tier does, learns what its loads cost, and turns it off when it cannot be relied on."""

import logging

from mini_infer_engine.core.kv_tiers.load_choice import CopyCost
from mini_infer_engine.core.kv_tiers.stats import TierStats

HOST = "host"
DISK = "disk"
MOST_MISMATCHES = 3
"""Pages with a wrong digest after which a tier is turned off: its memory or its link cannot be relied on."""

logger = logging.getLogger(__name__)


class Tier:
    """The counters and the state of one tier."""

    def __init__(self, name: str, cost: CopyCost) -> None:
        self.name = name
        self.cost = cost
        self.is_on = True
        self._prefetched_tokens = self._prefetch_used_tokens = self._prefetch_wasted_tokens = 0
        self._hit_tokens = self._declined_tokens = self._loaded_bytes = self._stored_bytes = 0
        self._load_s = self._store_s = 0.0
        self._mismatches = self._errors = 0

    def stored(self, num_bytes: int, seconds: float) -> None:
        """Counts a copy to this tier."""
        self._stored_bytes += num_bytes
        self._store_s += seconds

    def loaded(self, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Counts a copy from this tier, and learns from it."""
        self._loaded_bytes += num_bytes
        self._load_s += seconds
        self.cost.measured(num_tokens, seconds)

    def hit(self, num_tokens: int) -> None:
        """Counts tokens that a prompt got from this tier."""
        self._hit_tokens += num_tokens

    def declined(self, num_tokens: int) -> None:
        """Counts tokens that are computed, though this tier has them."""
        self._declined_tokens += num_tokens
        self.cost.declined()

    def prefetched(self, num_tokens: int) -> None:
        """Counts tokens whose load begins before a prompt that needs them is scheduled."""
        self._prefetched_tokens += num_tokens

    def prefetch_used(self, num_tokens: int) -> None:
        """Counts prefetched tokens that a prompt has hit."""
        self._prefetch_used_tokens += num_tokens

    def prefetch_wasted(self, num_tokens: int) -> None:
        """Counts prefetched tokens that no prompt has hit in time, or that could not be loaded."""
        self._prefetch_wasted_tokens += num_tokens

    def mismatch(self, source: str) -> None:
        """Counts a page that came back from `source` with another digest, and logs it while the tier is on. The last
        tolerable one turns the tier off.
        """
        self._mismatches += 1
        if self.is_on:
            message = "KV tier %s: %s came back with a wrong digest; its tokens are computed again"
            logger.error(message, self.name, source)
        if self._mismatches >= MOST_MISMATCHES and self.is_on:
            self.is_on = False
            logger.error("KV tier %s is off: %d pages came back with a wrong digest", self.name, self._mismatches)

    def failed(self, reason: str) -> None:
        """Counts a copy that failed, which turns the tier off."""
        self._errors += 1
        if self.is_on:
            self.is_on = False
            logger.error("KV tier %s is off: %s", self.name, reason)

    def stats(self, *, capacity_bytes: int, used_bytes: int, blocks: int, is_shared: bool = False) -> TierStats:
        """Returns the counters, with gauges that others know."""
        return TierStats(
            is_on=self.is_on,
            capacity_bytes=capacity_bytes,
            used_bytes=used_bytes,
            blocks=blocks,
            is_shared=is_shared,
            hit_tokens=self._hit_tokens,
            declined_tokens=self._declined_tokens,
            prefetched_tokens=self._prefetched_tokens,
            prefetch_used_tokens=self._prefetch_used_tokens,
            prefetch_wasted_tokens=self._prefetch_wasted_tokens,
            loaded_bytes=self._loaded_bytes,
            load_s=self._load_s,
            stored_bytes=self._stored_bytes,
            store_s=self._store_s,
            mismatches=self._mismatches,
            errors=self._errors,
        )
