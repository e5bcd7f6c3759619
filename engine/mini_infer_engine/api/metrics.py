"""What a server counts, and how /metrics shows it. Plain numbers while requests run, Prometheus only when asked."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mini_infer_contract import metrics as names
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core_process.messages import ModelInfo

_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SIZE_BUCKETS = tuple(float(2**exponent) for exponent in range(15))
_LENGTH_BUCKETS = tuple(float(2**exponent) for exponent in range(21))


class Histogram:
    """Counts by bucket; prometheus_client's own takes a lock and a scan for each value, and tokens are many."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it came."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, documentation: str, labels: dict[str, str] | None = None) -> Metric:
        """For Prometheus: counts up to each bound."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, documentation, labels=list(labels or ()))
        family.add_metric(list((labels or {}).values()), buckets, self._sum)
        return family


class ServerMetrics(Collector):
    """All numbers of one server."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.model: ModelInfo | None = None
        self.draining = False
        self.stats = EngineStats()
        self.generation_tokens = 0
        """Those that clients were given: none after a stop string."""
        self._finished: Counter[str] = Counter()
        self.time_to_first_token = Histogram(_LATENCY_BUCKETS_S)
        self.inter_token_latency = Histogram(_LATENCY_BUCKETS_S)
        self._duration = Histogram(_DURATION_BUCKETS_S)
        self._queue_time = Histogram(_LATENCY_BUCKETS_S)
        self._step_sequences = Histogram(_SIZE_BUCKETS)
        self._step_tokens = Histogram(_SIZE_BUCKETS)
        self._prompt_tokens = Histogram(_LENGTH_BUCKETS)
        self._output_tokens = Histogram(_LENGTH_BUCKETS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def take_stats(self, stats: EngineStats) -> None:
        """The core's numbers after a step."""
        old, self.stats = self.stats, stats
        admitted = stats.admissions - old.admissions
        if admitted:
            self._queue_time.observe((stats.queue_time_s - old.queue_time_s) / admitted, admitted)
        if stats.steps != old.steps:
            self._step_sequences.observe(stats.running)
            self._step_tokens.observe(stats.last_step_prefill_tokens + stats.last_step_decode_tokens)

    def count_finished(self, finish_reason: str, duration_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """A choice has ended."""
        self._prompt_tokens.observe(prompt_tokens)
        self._output_tokens.observe(output_tokens)
        self._finished[finish_reason] += 1
        self._duration.observe(duration_s)

    def exposition(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        yield from self._vllm_families()
        stats = self.stats
        yield GaugeMetricFamily(names.ENGINE_KV_USAGE, "Share of the page pool in use.", stats.kv_usage)
        yield GaugeMetricFamily(names.ENGINE_DRAINING, "1 from the start of a drain.", float(self.draining))
        finished = CounterMetricFamily(names.ENGINE_REQUESTS, "Finished requests.", labels=[names.LABEL_FINISH_REASON])
        for reason, count in self._finished.items():
            finished.add_metric([reason], count)
        yield finished
        for name, documentation, value in (
            (names.ENGINE_PROMPT_TOKENS, "Prompt tokens of admitted requests, cached ones too.", stats.prompt_tokens),
            (names.ENGINE_CACHED_TOKENS, "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens),
            (names.ENGINE_GENERATION_TOKENS, "Output tokens.", self.generation_tokens),
            (names.ENGINE_PREEMPTIONS, "Running requests sent back to the queue.", stats.preemptions),
        ):
            yield CounterMetricFamily(name, documentation, value)
        for name, documentation, histogram in (
            (names.ENGINE_TIME_TO_FIRST_TOKEN, "Arrival to first token.", self.time_to_first_token),
            (names.ENGINE_INTER_TOKEN_LATENCY, "Between tokens of one request.", self.inter_token_latency),
            (names.ENGINE_REQUEST_DURATION, "Arrival to last token.", self._duration),
            (names.ENGINE_QUEUE_TIME, "Arrival to first admission, averaged over a step.", self._queue_time),
            (names.ENGINE_STEP_SEQUENCES, "Sequences running at a step.", self._step_sequences),
            (names.ENGINE_STEP_TOKENS, "Tokens in one step's batch.", self._step_tokens),
        ):
            yield histogram.family(name, documentation)

    def _vllm_families(self) -> Iterable[Metric]:
        """What others read under vLLM's names, with its label."""
        labels = {"model_name": self._model_name, "engine": "0"}
        stats = self.stats
        for name, documentation, value in (
            (names.REQUESTS_RUNNING, "Requests that run.", stats.running),
            (names.REQUESTS_WAITING, "Requests that wait.", stats.waiting),
            (names.KV_CACHE_USAGE, "Share of the page pool in use.", stats.kv_usage),
        ):
            gauge = GaugeMetricFamily(name, documentation, labels=list(labels))
            gauge.add_metric(list(labels.values()), value)
            yield gauge
        for name, documentation, value in (
            (names.VLLM_PROMPT_TOKENS, "Prompt tokens of admitted requests.", stats.prompt_tokens),
            (names.VLLM_GENERATION_TOKENS, "Output tokens.", self.generation_tokens),
            (names.VLLM_PREEMPTIONS, "Running requests sent back to the queue.", stats.preemptions),
            (names.VLLM_PREFIX_CACHE_QUERIES, "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            (names.VLLM_PREFIX_CACHE_HITS, "Prompt tokens found there.", stats.cached_prompt_tokens),
        ):
            counter = CounterMetricFamily(name, documentation, labels=list(labels))
            counter.add_metric(list(labels.values()), value)
            yield counter
        success = CounterMetricFamily(
            names.VLLM_REQUEST_SUCCESS, "Finished requests.", labels=[*labels, "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([*labels.values(), reason], count)
        yield success
        for name, documentation, histogram in (
            (names.VLLM_TIME_TO_FIRST_TOKEN, "Arrival to first token.", self.time_to_first_token),
            (names.VLLM_INTER_TOKEN_LATENCY, "Between tokens of one request.", self.inter_token_latency),
            (names.VLLM_E2E_LATENCY, "Arrival to last token.", self._duration),
            (names.VLLM_QUEUE_TIME, "Arrival to first admission.", self._queue_time),
            (names.VLLM_ITERATION_TOKENS, "Tokens in one step's batch.", self._step_tokens),
            (names.VLLM_REQUEST_PROMPT_TOKENS, "Prompt tokens of a finished request.", self._prompt_tokens),
            (names.VLLM_REQUEST_GENERATION_TOKENS, "Output tokens of a finished request.", self._output_tokens),
        ):
            yield histogram.family(name, documentation, labels)
        if self.model is not None:
            info = GaugeMetricFamily(names.CACHE_CONFIG_INFO, "The page pool.", labels=["block_size", "num_gpu_blocks"])
            info.add_metric([str(self.model.page_size), str(self.model.num_pages)], 1)
            yield info
            if self.model.kernels:
                kernels = GaugeMetricFamily(
                    names.ENGINE_KERNELS_INFO, "The kernels in force.", labels=list(self.model.kernels)
                )
                kernels.add_metric(list(self.model.kernels.values()), 1)
                yield kernels
        lora_labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        lora = GaugeMetricFamily(names.LORA_REQUESTS_INFO, "Adapters: none are served.", labels=lora_labels)
        lora.add_metric(["0", "", ""], 1)
        yield lora
