"""What the gateway exports for Prometheus. Labels are bounded: known models, plugins, closed sets of reasons."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names

TTFB_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5)


class Metrics:
    """One gateway's numbers."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # A second series for each, which nothing of ours reads.
        self.registry = CollectorRegistry()
        model, registry = [names.LABEL_MODEL], self.registry
        self._requests = Counter(
            names.GATEWAY_REQUESTS, "Answered requests.", [*model, names.LABEL_STATUS], registry=registry
        )
        self._decisions = Counter(
            names.GATEWAY_ROUTING_DECISIONS, "Routing decisions.", [names.LABEL_REASON], registry=registry
        )
        self._prompt_tokens = Counter(
            names.GATEWAY_PROMPT_TOKENS, "Prompt tokens of routed requests.", model, registry=registry
        )
        self._hit_tokens = Counter(
            names.GATEWAY_HIT_TOKENS, "Prompt tokens held by the chosen endpoint.", model, registry=registry
        )
        self._retries = Counter(
            names.GATEWAY_RETRIES, "Requests sent to another endpoint.", [names.LABEL_REASON], registry=registry
        )
        self._gaps = Counter(
            names.GATEWAY_EVENT_GAPS, "Gaps in KV event sequences.", [names.LABEL_HEALED], registry=registry
        )
        self._first_byte = Histogram(
            names.GATEWAY_TIME_TO_FIRST_BYTE,
            "From arrival to the first body byte.",
            model,
            buckets=TTFB_BUCKETS_S,
            registry=registry,
        )
        self._overhead = Histogram(
            names.GATEWAY_OVERHEAD,
            "From arrival to the request going out.",
            buckets=OVERHEAD_BUCKETS_S,
            registry=registry,
        )

    def answered(self, model: str, status: int) -> None:
        """A request ended; `model` is "" where the client's is not known."""
        self._requests.labels(model, str(status)).inc()

    def decided(self, reason: str) -> None:
        """An endpoint was chosen; a retry is another decision."""
        self._decisions.labels(reason).inc()

    def overhead(self, seconds: float) -> None:
        """A request is about to go out for the first time."""
        self._overhead.observe(seconds)

    def first_byte(self, model: str, seconds: float, prompt_tokens: int, hit_tokens: int) -> None:
        """The first body byte came, from the endpoint that keeps the request."""
        self._first_byte.labels(model).observe(seconds)
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        self._hit_tokens.labels(model).inc(hit_tokens)

    def retried(self, reason: str) -> None:
        """A request goes to another endpoint."""
        self._retries.labels(reason).inc()

    def event_gap(self, healed: str) -> None:
        """KV events were lost and made up for by `healed`."""
        self._gaps.labels(healed).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)


class StateCollector:
    """Gauges that are read off the gateway's state when somebody asks, so that gone endpoints leave no series."""

    def __init__(
        self,
        states: Callable[[], Iterable[tuple[str, str, int]]],
        plugins: Callable[[], Iterable[tuple[str, int, float]]],
    ) -> None:
        """`states`: (model, endpoint state, requests in flight) of each endpoint; `plugins`: (name, calls, seconds)."""
        self._states, self._plugins = states, plugins

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        endpoints = GaugeMetricFamily(
            names.GATEWAY_ENDPOINTS, "Endpoints.", labels=[names.LABEL_MODEL, names.LABEL_STATE]
        )
        in_flight = GaugeMetricFamily(names.GATEWAY_IN_FLIGHT, "Requests being relayed.", labels=[names.LABEL_MODEL])
        counts: dict[tuple[str, str], int] = {}
        flights: dict[str, int] = {}
        for model, state, requests in self._states():
            counts[model, state] = counts.get((model, state), 0) + 1
            flights[model] = flights.get(model, 0) + requests
        for (model, state), count in counts.items():
            endpoints.add_metric([model, state], count)
        for model, count in flights.items():
            in_flight.add_metric([model], count)
        calls = CounterMetricFamily(
            names.GATEWAY_PLUGIN_CALLS, "Calls of a routing plugin.", labels=[names.LABEL_PLUGIN]
        )
        seconds = CounterMetricFamily(
            names.GATEWAY_PLUGIN_SECONDS, "Time spent in a routing plugin.", labels=[names.LABEL_PLUGIN]
        )
        for name, count, spent_s in self._plugins():
            calls.add_metric([name], count)
            seconds.add_metric([name], spent_s)
        return iter([endpoints, in_flight, calls, seconds])
