"""Merges the load reports of a server's engines, for gateways. Pure."""

from collections.abc import Sequence

from mini_infer_contract.events import LoadReport


def total_load(reports: Sequence[LoadReport], accepted: list[str], role: str) -> LoadReport:
    """Merges the last report of each engine, at least one: sums, and the mean of the shares of used pages.

    `accepted` are the requests that arrived since the last such report.
    """
    return LoadReport(
        ts=max(report.ts for report in reports),
        running=sum(report.running for report in reports),
        waiting=sum(report.waiting for report in reports),
        queued_tokens=sum(report.queued_tokens for report in reports),
        kv_usage=sum(report.kv_usage for report in reports) / len(reports),
        accepted=accepted,
        role=role,
        prefill_tokens_per_s=sum(report.prefill_tokens_per_s for report in reports),
        host_tokens_per_s=sum(report.host_tokens_per_s for report in reports),
        disk_tokens_per_s=sum(report.disk_tokens_per_s for report in reports),
        engines=len(reports),
        memory_bytes=sum(report.memory_bytes for report in reports),
    )
