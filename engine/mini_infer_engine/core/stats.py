"""Defines plain counters of an engine, for exporters of metrics. No metric names here."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from mini_infer_engine.core.kv_tiers.stats import NO_TIER_STATS, KVTierStats
from mini_infer_engine.core.kv_transfer import NO_TRANSFERS, KVTransferStats
from mini_infer_engine.core.step import Step


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, from which rates are differences, and gauges of this moment."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the pages in use, 0 to 1; free pages that are still cached do not count."""
    preemptions: int = 0
    steps: int = 0
    """Passes launched."""
    failed_passes: int = 0
    """Passes that could not be launched, or whose result could not be had."""
    prefill_tokens: int = 0
    """Tokens computed in prefill chunks, recomputed ones too."""
    decode_tokens: int = 0
    """Decode rows launched, those thrown away too."""
    generation_tokens: int = 0
    """Output tokens."""
    last_step_prefill_tokens: int = 0
    last_step_decode_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests: those that were looked up in the prefix cache."""
    cached_prompt_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    admissions: int = 0
    """First admissions."""
    queue_time_s: float = 0.0
    """Summed over first admissions, from arrival to admission."""
    drafts: int = 0
    """Rows with draft tokens."""
    draft_tokens: int = 0
    """Draft tokens."""
    accepted_tokens_by_position: list[int] = field(default_factory=list)
    """Accepted draft tokens by their position after the last known token; empty if nothing is drafted."""

    prefill_tokens_per_s: float = 0.0
    """Gauge: recent rate of passes with prompts; 0 before any was measured."""
    kv_transfer: KVTransferStats = NO_TRANSFERS
    weights_sent_bytes: int = 0
    """Bytes of weights sent to engines that start."""
    kv_tiers: KVTierStats = NO_TIER_STATS

    @classmethod
    def total(cls, parts: Sequence["EngineStats"]) -> "EngineStats":
        """Returns the total of engines that run side by side: sums, and the mean of `kv_usage`. They must have no KV
        transfers.
        """
        if len(parts) == 1:
            return parts[0]
        summed = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        by_position = zip_longest(*(part.accepted_tokens_by_position for part in parts), fillvalue=0)
        return cls(
            **summed,
            kv_tiers=KVTierStats.total([part.kv_tiers for part in parts]),
            kv_usage=sum(part.kv_usage for part in parts) / len(parts),
            accepted_tokens_by_position=[sum(counts) for counts in by_position],
        )

    def count_launch(self, step: Step) -> None:
        """Counts a launched pass."""
        decodes = step.batch.num_decodes
        prefill = sum(row.count for row in step.batch.rows[decodes:])
        self.steps += 1
        self.prefill_tokens += prefill
        self.decode_tokens += decodes if not step.batch.num_drafts else step.batch.num_tokens - prefill
        self.last_step_prefill_tokens = prefill
        self.last_step_decode_tokens = decodes

    def count_admissions(self, step: Step, now_s: float) -> None:
        """Counts sequences that a plan admits for the first time."""
        for sequence in step.admitted:
            self.admissions += 1
            sequence.queue_time_s = now_s - sequence.arrival_s
            self.queue_time_s += sequence.queue_time_s
            self.prompt_tokens += sequence.num_prompt
            self.cached_prompt_tokens += sequence.num_cached or 0


_NOT_SUMMED = {"kv_usage", "accepted_tokens_by_position", "kv_transfer", "kv_tiers"}
_SUMMED = {one.name for one in fields(EngineStats)} - _NOT_SUMMED
