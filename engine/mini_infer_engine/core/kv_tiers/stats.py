"""Defines counters of the prefix cache's tiers. No metric names here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

_SHARED_GAUGES = ("capacity_bytes", "used_bytes", "blocks")


@dataclass(slots=True, frozen=True)
class TierStats:
    """Counters of one tier since the start, except for gauges, which hold now."""

    is_on: bool = True
    """Gauge: False once the tier was turned off by errors or mismatches."""
    capacity_bytes: int = 0
    """Gauge: the size of the tier."""
    used_bytes: int = 0
    """Gauge: bytes of cached blocks."""
    blocks: int = 0
    """Gauge: cached blocks of 16 tokens."""
    is_shared: bool = False
    """True if engines that run side by side have this tier in common: gauges are not added up."""
    hit_tokens: int = 0
    """Prompt tokens that were loaded from this tier instead of being computed."""
    declined_tokens: int = 0
    """Cached tokens that were computed, as that was expected to be faster."""
    prefetched_tokens: int = 0
    """Tokens that were loaded before a prompt was scheduled that needs them."""
    prefetch_used_tokens: int = 0
    """Prefetched tokens that a prompt has hit."""
    prefetch_wasted_tokens: int = 0
    """Prefetched tokens that no prompt has hit in time, or that could not be loaded."""
    loaded_bytes: int = 0
    load_s: float = 0.0
    """Seconds of loads, summed."""
    stored_bytes: int = 0
    store_s: float = 0.0
    """Seconds of stores, summed; several may run at a time."""
    mismatches: int = 0
    """Pages whose digest was another one when they came back: their tokens were computed."""
    errors: int = 0
    """Copies that failed."""

    @classmethod
    def total(cls, parts: Sequence["TierStats"]) -> "TierStats":
        """Returns the sums of engines that run side by side; a tier is on where it is on in all of them."""
        sums = {one.name: sum(getattr(part, one.name) for part in parts) for one in fields(cls)}
        is_shared = any(part.is_shared for part in parts)
        if is_shared:
            sums |= {name: max(getattr(part, name) for part in parts) for name in _SHARED_GAUGES}
        return cls(**{**sums, "is_on": all(part.is_on for part in parts), "is_shared": is_shared})


@dataclass(slots=True, frozen=True)
class KVTierStats:
    """The tiers of an engine, by name: host, disk. Empty if there are none."""

    tiers: Mapping[str, TierStats] = field(default_factory=dict)

    @classmethod
    def total(cls, parts: Sequence["KVTierStats"]) -> "KVTierStats":
        """Returns the totals of engines that run side by side, by tier."""
        names = dict.fromkeys(name for part in parts for name in part.tiers)
        return cls(
            {name: TierStats.total([part.tiers[name] for part in parts if name in part.tiers]) for name in names}
        )


NO_TIER_STATS = KVTierStats()


def with_tier(stats: KVTierStats, name: str, tier: TierStats | None) -> KVTierStats:
    """Returns the statistics with one more tier, if there is one."""
    return stats if tier is None else KVTierStats({**stats.tiers, name: tier})
