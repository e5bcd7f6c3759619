"""Metrics of the prefix cache's tiers, as /metrics shows them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names
from mini_infer_engine.core.kv_tiers.stats import KVTierStats

_COUNTERS = (
    (names.ENGINE_KV_TIER_HIT_TOKENS, "Tokens that came from a tier.", "hit_tokens"),
    (names.ENGINE_KV_TIER_DECLINED_TOKENS, "Tokens computed though a tier had them.", "declined_tokens"),
    (names.ENGINE_KV_TIER_PREFETCHED_TOKENS, "Tokens loaded before a prompt needed them.", "prefetched_tokens"),
    (names.ENGINE_KV_TIER_PREFETCH_USED_TOKENS, "Prefetched tokens that a prompt has hit.", "prefetch_used_tokens"),
    (names.ENGINE_KV_TIER_PREFETCH_WASTED_TOKENS, "Prefetched tokens that none has hit.", "prefetch_wasted_tokens"),
    (names.ENGINE_KV_TIER_MISMATCHES, "Pages that came back with a wrong digest.", "mismatches"),
    (names.ENGINE_KV_TIER_ERRORS, "Copies that failed.", "errors"),
)
_GAUGES = (
    (names.ENGINE_KV_TIER_ON, "1 while the tier is in use.", "is_on"),
    (names.ENGINE_KV_TIER_CAPACITY, "Size of the tier.", "capacity_bytes"),
    (names.ENGINE_KV_TIER_BYTES, "Bytes of cached blocks.", "used_bytes"),
    (names.ENGINE_KV_TIER_BLOCKS, "Cached blocks of 16 tokens.", "blocks"),
)
_COPIES = (
    (names.ENGINE_KV_TIER_MOVED_BYTES, "Bytes of pages copied.", "loaded_bytes", "stored_bytes"),
    (names.ENGINE_KV_TIER_SECONDS, "Time of these copies.", "load_s", "store_s"),
)


def kv_tier_families(stats: KVTierStats) -> Iterator[Metric]:
    """Yields all families, with samples of the tiers that there are."""
    for kind, rows in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for name, documentation, attribute in rows:
            family = kind(name, documentation, labels=[names.LABEL_TIER])
            for tier, counts in stats.tiers.items():
                family.add_metric([tier], float(getattr(counts, attribute)))
            yield family
    for name, documentation, loaded, stored in _COPIES:
        family = CounterMetricFamily(name, documentation, labels=[names.LABEL_TIER, names.LABEL_DIRECTION])
        for tier, counts in stats.tiers.items():
            family.add_metric([tier, "load"], getattr(counts, loaded))
            family.add_metric([tier, "store"], getattr(counts, stored))
        yield family
