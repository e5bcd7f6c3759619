"""Metrics of the offline API, with vLLM's names: of one request, and of the engine so far. It runs nothing."""

from dataclasses import dataclass

import msgspec

from mini_infer_engine.core.stats import EngineStats


class RequestStateStats(msgspec.Struct, frozen=True, gc=False):
    """Times of one request. `arrival_time` is the time of day in seconds, others are seconds of the monotonic clock."""

    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    """Time at which the engine got the request."""
    scheduled_ts: float | None
    """Time at which it began to run; None if the engine does not report it."""
    first_token_ts: float | None
    last_token_ts: float | None
    first_token_latency: float | None
    """Seconds from arrival to the first token."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A count since the engine was made."""

    name: str
    labels: dict[str, str]
    value: int


@dataclass(frozen=True, slots=True)
class Gauge:
    """A current value."""

    name: str
    labels: dict[str, str]
    value: float


def metrics_of(stats: EngineStats, model: str) -> list[Counter | Gauge]:
    """Returns an engine's numbers as vLLM's `get_metrics` names them."""
    labels = {"model_name": model, "engine": "0"}
    gauges = {
        "vllm:num_requests_running": stats.running,
        "vllm:num_requests_waiting": stats.waiting,
        "vllm:kv_cache_usage_perc": stats.kv_usage,
    }
    counters = {
        "vllm:num_preemptions": stats.preemptions,
        "vllm:prompt_tokens": stats.prompt_tokens,
        "vllm:generation_tokens": stats.generation_tokens,
        "vllm:prefix_cache_queries": stats.prompt_tokens,
        "vllm:prefix_cache_hits": stats.cached_prompt_tokens,
        "vllm:spec_decode_num_drafts": stats.drafts,
        "vllm:spec_decode_num_draft_tokens": stats.draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": sum(stats.accepted_tokens_by_position),
    }
    return [
        *(Gauge(name, labels, value) for name, value in gauges.items()),
        *(Counter(name, labels, value) for name, value in counters.items()),
    ]
