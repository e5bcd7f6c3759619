"""Counts a server's requests and tokens, and shows them at /metrics. Plain numbers while requests run, Prometheus when
scraped.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mini_infer_contract import metrics as names
from mini_infer_engine.api import vllm_metric_names
from mini_infer_engine.api.histogram import LATENCY_BUCKETS_S, SIZE_BUCKETS, Histogram
from mini_infer_engine.api.kv_tier_metrics import kv_tier_families
from mini_infer_engine.api.kv_transfer_metrics import kv_transfer_families
from mini_infer_engine.api.start_metrics import start_families
from mini_infer_engine.api.vllm_metrics import VllmMetrics
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.structured.proving.prover import ENDS


class ServerMetrics(Collector):
    """All metrics of one server."""

    def __init__(self, model_name: str, engines: int = 1) -> None:
        """Takes the number of the server's engines."""
        self.draining = False
        self.role = "unified"
        self.grammar_worker_ends: Mapping[str, int] = {}
        """Number of workers that were ended while they checked a grammar, by the limit that they met; the server sets
        it.
        """
        self.engines = [VllmMetrics(model_name, number) for number in range(engines)]
        self._queue_time = Histogram(LATENCY_BUCKETS_S)
        self._step_sequences = Histogram(SIZE_BUCKETS)
        self._step_tokens = Histogram(SIZE_BUCKETS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @property
    def stats(self) -> EngineStats:
        """Statistics of all engines together."""
        return EngineStats.total([engine.stats for engine in self.engines])

    @property
    def generation_tokens(self) -> int:
        """Output tokens of all engines together."""
        return sum(engine.generation_tokens for engine in self.engines)

    @property
    def model(self) -> ModelInfo | None:
        """The model as the first engine runs it."""
        return self.engines[0].model

    def take_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Takes a core's statistics after a step."""
        old = self.engines[engine].stats
        self.engines[engine].take_stats(stats)
        admitted = stats.admissions - old.admissions
        if admitted:
            self._queue_time.observe((stats.queue_time_s - old.queue_time_s) / admitted, admitted)
        if stats.steps != old.steps:
            self._step_sequences.observe(stats.running)
            self._step_tokens.observe(stats.last_step_prefill_tokens + stats.last_step_decode_tokens)

    def exposition(self) -> bytes:
        """Returns the body of /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics for Prometheus."""
        stats, engines = self.stats, self.engines
        yield from _merged([engine.families() for engine in engines])
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        served = GaugeMetricFamily(
            vllm_metric_names.LORA_REQUESTS_INFO, "Adapters: none are served.", labels=list(adapters)
        )
        served.add_metric(list(adapters.values()), 1)
        yield served
        yield GaugeMetricFamily(names.ENGINE_KV_USAGE, "Share of the page pool in use.", stats.kv_usage)
        yield GaugeMetricFamily(names.ENGINE_DRAINING, "1 from the start of a drain.", float(self.draining))
        finished = CounterMetricFamily(names.ENGINE_REQUESTS, "Finished requests.", labels=[names.LABEL_FINISH_REASON])
        for reason, count in sum((engine.finished for engine in engines), Counter[str]()).items():
            finished.add_metric([reason], count)
        yield finished
        yield self._targets()
        ended = CounterMetricFamily(
            names.ENGINE_GRAMMAR_WORKERS_ENDED,
            "Workers ended while they checked a grammar.",
            labels=[names.LABEL_LIMIT],
        )
        for limit in ENDS:
            ended.add_metric([limit], self.grammar_worker_ends.get(limit, 0))
        yield ended
        for name, documentation, value in (
            (names.ENGINE_PROMPT_TOKENS, "Prompt tokens of admitted requests, cached ones too.", stats.prompt_tokens),
            (names.ENGINE_CACHED_TOKENS, "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens),
            (names.ENGINE_GENERATION_TOKENS, "Output tokens.", self.generation_tokens),
            (names.ENGINE_PREEMPTIONS, "Running requests sent back to the queue.", stats.preemptions),
            (
                names.ENGINE_SLO_REFUSALS,
                "Requests refused for their latency targets.",
                sum(engine.slo_refusals for engine in engines),
            ),
        ):
            yield CounterMetricFamily(name, documentation, value)
        first_token = Histogram.total([engine.time_to_first_token for engine in engines])
        inter_token = Histogram.total([engine.inter_token_latency for engine in engines])
        duration = Histogram.total([engine.duration for engine in engines])
        for name, documentation, histogram in (
            (names.ENGINE_TIME_TO_FIRST_TOKEN, "Arrival to first token.", first_token),
            (names.ENGINE_INTER_TOKEN_LATENCY, "Between tokens of one request.", inter_token),
            (names.ENGINE_REQUEST_DURATION, "Arrival to last token.", duration),
            (names.ENGINE_QUEUE_TIME, "Arrival to first admission, averaged over a step.", self._queue_time),
            (names.ENGINE_STEP_SEQUENCES, "Sequences running at a step.", self._step_sequences),
            (names.ENGINE_STEP_TOKENS, "Tokens in one step's batch.", self._step_tokens),
        ):
            yield histogram.family(name, documentation)
        transport = "" if self.model is None else self.model.kv_transport
        yield from kv_transfer_families(stats, self.role, transport)
        yield from kv_tier_families(stats.kv_tiers)
        if self.model is not None:
            memory = GaugeMetricFamily(
                names.ENGINE_DEVICE_MEMORY, "Device memory that the engine keeps, by use.", labels=["tag"]
            )
            for tag, num_bytes in self.model.device_memory.items():
                memory.add_metric([tag], num_bytes)
            yield memory
            yield from start_families(self.model, stats)
        if self.model is not None and self.model.kernels:
            kernels = GaugeMetricFamily(
                names.ENGINE_KERNELS_INFO, "The kernels in force.", labels=list(self.model.kernels)
            )
            kernels.add_metric(list(self.model.kernels.values()), 1)
            yield kernels

    def _targets(self) -> Metric:
        family = CounterMetricFamily(
            names.ENGINE_LATENCY_TARGETS,
            "Latency targets of finished requests.",
            labels=[names.LABEL_KIND, names.LABEL_RESULT],
        )
        for labels in product(("ttft", "itl", "deadline"), ("met", "missed")):
            family.add_metric(labels, sum(engine.targets[labels] for engine in self.engines))
        return family


def _merged(engines: list[Iterator[Metric]]) -> Iterable[Metric]:
    """Merges families of the same name into one, with the samples of all engines."""
    merged: dict[str, Metric] = {}
    for families in engines:
        for family in families:
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = family
    return merged.values()
