"""Metrics of transfers of keys and values between engines, as /metrics shows them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names
from mini_infer_engine.core.stats import EngineStats


def kv_transfer_families(stats: EngineStats, role: str, transport: str) -> Iterator[Metric]:
    """Yields all families; an empty `transport` means that nothing moves."""
    moved = stats.kv_transfer
    info = GaugeMetricFamily(names.ENGINE_KV_TRANSFER_INFO, "What moves keys and values.", labels=["role", "transport"])
    info.add_metric([role, transport or "none"], 1)
    yield info
    yield GaugeMetricFamily(names.ENGINE_PREFILL_RATE, "Prompt tokens a second, lately.", stats.prefill_tokens_per_s)
    for name, documentation, received, sent in (
        (names.ENGINE_KV_TRANSFERS, "Prompts whose keys and values moved.", moved.received, moved.sent),
        (names.ENGINE_KV_TRANSFER_BYTES, "Bytes of them.", moved.received_bytes, moved.sent_bytes),
        (names.ENGINE_KV_TRANSFER_SECONDS, "Time that took.", moved.received_s, moved.sent_s),
    ):
        family = CounterMetricFamily(name, documentation, labels=["direction"])
        family.add_metric(["received"], received)
        family.add_metric(["given"], sent)
        yield family
    fallbacks = CounterMetricFamily(
        names.ENGINE_KV_TRANSFER_FALLBACKS, "Prompts computed here after all.", labels=["reason"]
    )
    for reason, count in moved.fallbacks.items():
        fallbacks.add_metric([reason], count)
    yield fallbacks
    mismatches = CounterMetricFamily(
        names.ENGINE_KV_TRANSFER_MISMATCHES, "Transfers with a wrong digest: computed here.", labels=["source"]
    )
    for source, count in moved.mismatches.items():
        mismatches.add_metric([source], count)
    yield mismatches
    for name, documentation, value in (
        (names.ENGINE_KV_TRANSFER_ESTIMATED_SECONDS, "Estimated before.", moved.estimated_s),
        (names.ENGINE_KV_TRANSFER_ESTIMATE_ERROR_SECONDS, "Error of estimates.", moved.estimate_error_s),
        (names.ENGINE_KV_TRANSFER_LEASES_EXPIRED, "Leases that expired.", moved.leases_expired),
        (names.ENGINE_KV_TRANSFER_FAULTS, "Messages and transfers that failed by a fault.", moved.faults),
    ):
        yield CounterMetricFamily(name, documentation, value)
    for name, documentation, number in (
        (names.ENGINE_KV_TRANSFER_LEASES, "Transfers that are not settled.", moved.open_leases),
        (names.ENGINE_KV_TRANSFER_PINNED_PAGES, "Pages kept for transfers.", moved.pinned_pages),
        (names.ENGINE_KV_TRANSFER_FAILED, "KV transfer has ended by a fault.", int(moved.has_failed)),
    ):
        yield GaugeMetricFamily(name, documentation, number)
