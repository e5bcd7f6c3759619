"""A server's metrics under vLLM's names, with its labels and its meaning: dashboards and autoscalers read those.

Metrics of features that this engine lacks are left out: sleep states, corrupted requests, caches of pictures and
outside of the process, and the residency of blocks.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names
from mini_infer_engine.api import vllm_metric_names as vllm_names
from mini_infer_engine.api.histogram import (
    COUNT_BUCKETS,
    DURATION_BUCKETS_S,
    LATENCY_BUCKETS_S,
    LENGTH_BUCKETS,
    SIZE_BUCKETS,
    Histogram,
)
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core_process.messages import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedChoice:
    """One choice of a request at its end. Times are seconds since the request's arrival."""

    reason: str
    duration_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int
    max_tokens: int | None = None
    """Most output tokens; None for as many as the context has room for."""
    queue_time_s: float | None = None
    """Seconds until its first admission; None if the core has not reported it, since the choice did not
    end by itself.
    """
    first_token_s: float | None = None
    last_token_s: float = 0.0


class VllmMetrics:
    """Counts what vLLM counts, for one engine of a server."""

    def __init__(self, model_name: str, engine: int = 0) -> None:
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self.model: ModelInfo | None = None
        self.stats = EngineStats()
        self.generation_tokens = 0
        """Output tokens that clients were given: none after a stop string."""
        self.time_to_first_token = Histogram(LATENCY_BUCKETS_S)
        self.inter_token_latency = Histogram(LATENCY_BUCKETS_S)
        self.duration = Histogram(DURATION_BUCKETS_S)
        self.finished: Counter[str] = Counter()
        self.targets: Counter[tuple[str, str]] = Counter()
        """Latency targets of finished choices, by kind and by "met" or "missed"."""
        self.slo_refusals = 0
        """Choices that were refused because their latency targets could not be met."""
        self._queue_time = Histogram(DURATION_BUCKETS_S)
        self._prefill_time = Histogram(DURATION_BUCKETS_S)
        self._decode_time = Histogram(DURATION_BUCKETS_S)
        self._inference_time = Histogram(DURATION_BUCKETS_S)
        self._time_per_output_token = Histogram(LATENCY_BUCKETS_S)
        self._prompt_tokens = Histogram(LENGTH_BUCKETS)
        self._computed_prompt_tokens = Histogram(LENGTH_BUCKETS)
        self._output_tokens = Histogram(LENGTH_BUCKETS)
        self._max_tokens = Histogram(LENGTH_BUCKETS)
        self._num_choices = Histogram(COUNT_BUCKETS)
        self._most_output_tokens = Histogram(LENGTH_BUCKETS)
        self._iteration_tokens = Histogram(SIZE_BUCKETS)
        self._untold_prompt_tokens = 0

    def take_stats(self, new: EngineStats) -> None:
        """Takes the core's statistics after a step, and counts the step's tokens: those emitted, and the prompts before
        them.
        """
        old, self.stats = self.stats, new
        self._untold_prompt_tokens += new.prompt_tokens - old.prompt_tokens
        if made := new.generation_tokens - old.generation_tokens:
            self._iteration_tokens.observe(made + self._untold_prompt_tokens)
            self._untold_prompt_tokens = 0

    def count_choice(self, choice: FinishedChoice) -> None:
        """Counts a choice that has ended. Phases are counted for choices that ended by themselves, as in vLLM."""
        self.finished[choice.reason] += 1
        self.duration.observe(choice.duration_s)
        self._prompt_tokens.observe(choice.prompt_tokens)
        self._computed_prompt_tokens.observe(choice.prompt_tokens - choice.cached_tokens)
        self._output_tokens.observe(choice.output_tokens)
        max_tokens = choice.max_tokens
        if max_tokens is None and self.model is not None:
            max_tokens = self.model.max_model_len - choice.prompt_tokens
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)
        if choice.queue_time_s is None or choice.first_token_s is None:
            return
        decoding_s = choice.last_token_s - choice.first_token_s
        self._queue_time.observe(choice.queue_time_s)
        self._prefill_time.observe(max(0.0, choice.first_token_s - choice.queue_time_s))
        self._decode_time.observe(decoding_s)
        self._inference_time.observe(max(0.0, choice.last_token_s - choice.queue_time_s))
        if choice.output_tokens > 1:
            self._time_per_output_token.observe(decoding_s / (choice.output_tokens - 1))

    def count_target(self, kind: str, target_ms: float | None, seconds: float) -> None:
        """Counts a latency target of a choice that has ended; None if it has none of this kind."""
        if target_ms is not None:
            self.targets[kind, "met" if 1000 * seconds <= target_ms else "missed"] += 1

    def count_prompt(self, num_choices: int, most_output_tokens: int) -> None:
        """Counts a prompt whose choices have all ended."""
        self._num_choices.observe(num_choices)
        self._most_output_tokens.observe(most_output_tokens)

    def families(self) -> Iterator[Metric]:
        """Yields all families for Prometheus."""
        yield from self._gauges(self.stats)
        yield from self._counters(self.stats, self.generation_tokens)
        for name, documentation, histogram in (
            (vllm_names.TIME_TO_FIRST_TOKEN, "Arrival to first token.", self.time_to_first_token),
            (vllm_names.INTER_TOKEN_LATENCY, "Between tokens of one request.", self.inter_token_latency),
            (vllm_names.TIME_PER_OUTPUT_TOKEN, "Mean of a request after its first.", self._time_per_output_token),
            (vllm_names.E2E_LATENCY, "Arrival to last token.", self.duration),
            (vllm_names.QUEUE_TIME, "Arrival to first admission.", self._queue_time),
            (vllm_names.PREFILL_TIME, "First admission to first token.", self._prefill_time),
            (vllm_names.DECODE_TIME, "First token to last token.", self._decode_time),
            (vllm_names.INFERENCE_TIME, "First admission to last token.", self._inference_time),
            (vllm_names.ITERATION_TOKENS, "Tokens given out in a step, and prompts begun.", self._iteration_tokens),
            (vllm_names.REQUEST_PROMPT_TOKENS, "Prompt tokens of a finished request.", self._prompt_tokens),
            (vllm_names.PREFILL_KV_COMPUTED, "Of those, the ones not cached.", self._computed_prompt_tokens),
            (vllm_names.REQUEST_GENERATION_TOKENS, "Output tokens of a finished request.", self._output_tokens),
            (vllm_names.MAX_NUM_GENERATION_TOKENS, "Of the longest choice of a prompt.", self._most_output_tokens),
            (vllm_names.PARAMS_N, "Choices of a prompt.", self._num_choices),
            (vllm_names.PARAMS_MAX_TOKENS, "Output tokens that a request allows.", self._max_tokens),
        ):
            yield histogram.family(name, documentation, self._labels)
        if (model := self.model) is not None:
            engine = self._labels["engine"]
            sizes = {"block_size": str(model.page_size), "num_gpu_blocks": str(model.num_pages), "engine": engine}
            sizes["cache_dtype"] = model.kernels.get("kv_cache") or "auto"
            tokens = model.kv_cache_tokens or model.page_size * model.num_pages
            sizes["kv_cache_size_tokens"] = str(tokens)
            sizes["kv_cache_max_concurrency"] = f"{tokens / model.max_model_len:.2f}"
            yield _one(GaugeMetricFamily, vllm_names.CACHE_CONFIG_INFO, "The page pool.", sizes, 1)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for name, documentation, value in (
            (names.REQUESTS_RUNNING, "Requests that run.", stats.running),
            (names.REQUESTS_WAITING, "Requests that wait.", stats.waiting),
            (names.KV_CACHE_USAGE, "Share of the page pool in use.", stats.kv_usage),
        ):
            yield _one(GaugeMetricFamily, name, documentation, self._labels, value)
        reasons = GaugeMetricFamily(
            names.REQUESTS_WAITING_BY_REASON, "Those that wait, and for what.", labels=[*self._labels, "reason"]
        )
        for reason, value in (("capacity", stats.waiting), ("deferred", 0)):
            reasons.add_metric([*self._labels.values(), reason], value)
        yield reasons

    def _counters(self, stats: EngineStats, generation_tokens: int) -> Iterator[Metric]:
        cached = stats.cached_prompt_tokens
        for name, documentation, value in (
            (vllm_names.PROMPT_TOKENS, "Prompt tokens of admitted requests.", stats.prompt_tokens),
            (vllm_names.PROMPT_TOKENS_CACHED, "Of those, the ones found in the prefix cache.", cached),
            (vllm_names.GENERATION_TOKENS, "Output tokens.", generation_tokens),
            (vllm_names.PREEMPTIONS, "Running requests sent back to the queue.", stats.preemptions),
            (vllm_names.PREFIX_CACHE_QUERIES, "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            (vllm_names.PREFIX_CACHE_HITS, "Prompt tokens found there.", cached),
        ):
            yield _one(CounterMetricFamily, name, documentation, self._labels, value)
        by_source = CounterMetricFamily(
            vllm_names.PROMPT_TOKENS_BY_SOURCE, "Prompt tokens of admitted requests.", labels=[*self._labels, "source"]
        )
        for source, value in (("local_compute", stats.prompt_tokens - cached), ("local_cache_hit", cached)):
            by_source.add_metric([*self._labels.values(), source], value)
        yield by_source
        yield from self._speculation(stats)
        success = CounterMetricFamily(
            vllm_names.REQUEST_SUCCESS, "Finished requests.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        """Yields the metrics of speculation; none if there are no draft tokens, as in vLLM."""
        by_position = stats.accepted_tokens_by_position
        if not by_position:
            return
        for name, documentation, value in (
            (vllm_names.SPEC_DRAFTS, "Times that tokens were guessed for a sequence.", stats.drafts),
            (vllm_names.SPEC_DRAFT_TOKENS, "Tokens guessed.", stats.draft_tokens),
            (vllm_names.SPEC_ACCEPTED_TOKENS, "Guesses that were right and counted.", sum(by_position)),
        ):
            yield _one(CounterMetricFamily, name, documentation, self._labels, value)
        accepted = CounterMetricFamily(
            vllm_names.SPEC_ACCEPTED_PER_POSITION, "Of those, by place.", labels=[*self._labels, "position"]
        )
        for position, count in enumerate(by_position):
            accepted.add_metric([*self._labels.values(), str(position)], count)
        yield accepted


def _one(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    documentation: str,
    labels: dict[str, str],
    value: float,
) -> Metric:
    made = family(name, documentation, labels=list(labels))
    made.add_metric(list(labels.values()), value)
    return made
