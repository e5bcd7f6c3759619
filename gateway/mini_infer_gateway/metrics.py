"""The gateway's metrics for Prometheus. Labels are bounded: known models, plugins, closed sets of reasons."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names
from mini_infer_gateway.routing.base import PrefillReason

Labelled = TypeVar("Labelled", Counter, Gauge, Histogram)

TTFB_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5)

PLACEMENTS: Mapping[PrefillReason, str] = {"cheaper": "apart", "forced": "apart", "fetch": "fetched"}
"""Label of the placement by reason; all other reasons have "local"."""

_TIERS = ("device", "host", "disk")


class Outcome(Enum):
    """The outcome of a request, or of one attempt at one endpoint; the value is the label."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    BROKE = "broke"
    IN_BAND_ERROR = "in_band_error"
    CLIENT_DISCONNECTED = "client_gone"
    RETRIED = "retried"
    CONTINUED = "continued"
    INTERNAL = "internal"


def outcome_of(status: int) -> Outcome:
    """Returns the outcome of a complete answer."""
    return Outcome.OK if status < 400 else Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR


@dataclass(frozen=True, slots=True)
class EndpointFigures:
    """The figures of one endpoint at the time of a scrape."""

    name: str
    model: str
    state: str
    in_flight: int
    cause: str
    """The cause for which its circuit is open; "" if it is closed."""
    lag_s: float
    index_blocks: int


class Metrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # A second series for each, which nothing of ours reads.
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        model, registry = [names.LABEL_MODEL], self.registry
        self._requests = Counter(
            names.GATEWAY_REQUESTS,
            "Answered requests.",
            [*model, names.LABEL_STATUS, names.LABEL_OUTCOME],
            registry=registry,
        )
        self._attempts = Counter(
            names.GATEWAY_ATTEMPTS,
            "Requests that went to an endpoint.",
            [names.LABEL_ENDPOINT, names.LABEL_OUTCOME],
            registry=registry,
        )
        self._duration = Histogram(
            names.GATEWAY_REQUEST_DURATION,
            "From arrival to the end of the answer.",
            model,
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._tokenize = Histogram(
            names.GATEWAY_TOKENIZE, "From a body to its block keys.", buckets=OVERHEAD_BUCKETS_S, registry=registry
        )
        self._decisions = Counter(
            names.GATEWAY_ROUTING_DECISIONS, "Routing decisions.", [names.LABEL_REASON], registry=registry
        )
        self._prefill_placements = Counter(
            names.GATEWAY_PREFILL_PLACEMENTS,
            "Where prompts were computed, where there was a choice.",
            [*model, names.LABEL_PLACEMENT, names.LABEL_REASON],
            registry=registry,
        )
        self._break_even = Gauge(
            names.GATEWAY_BREAK_EVEN_TOKENS,
            "Uncached prompt tokens from which on a prompt goes apart.",
            model,
            registry=registry,
        )
        self._first_token_apart = Histogram(
            names.GATEWAY_FIRST_TOKEN_APART,
            "To the first byte of a stream whose prompt was computed apart.",
            [names.LABEL_KIND],
            buckets=TTFB_BUCKETS_S,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            names.GATEWAY_PROMPT_TOKENS, "Prompt tokens of routed requests.", model, registry=registry
        )
        self._hit_tokens = Counter(
            names.GATEWAY_HIT_TOKENS, "Prompt tokens held by the chosen endpoint.", model, registry=registry
        )
        self._hit_tier_tokens = Counter(
            names.GATEWAY_HIT_TIER_TOKENS,
            "Prompt tokens held by the chosen endpoint, by the tier of their fastest copy.",
            [names.LABEL_MODEL, names.LABEL_TIER],
            registry=registry,
        )
        self._prefetches = Counter(
            names.GATEWAY_PREFETCHES,
            "Sessions whose engine was asked to load their blocks.",
            [names.LABEL_OUTCOME],
            registry=registry,
        )
        self._return_gap = Histogram(
            names.GATEWAY_RETURN_GAP,
            "From the end of an answer to its session's next request.",
            [names.LABEL_KIND],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._retries = Counter(
            names.GATEWAY_RETRIES, "Requests sent to another endpoint.", [names.LABEL_REASON], registry=registry
        )
        self._continuations = Counter(
            names.GATEWAY_CONTINUATIONS,
            "Streams that lost their endpoint.",
            [names.LABEL_OUTCOME],
            registry=registry,
        )
        self._poison_refused = Counter(
            names.GATEWAY_POISON_REFUSED,
            "Requests refused because the same request ended engines before.",
            registry=registry,
        )
        self._continuation_off = Counter(
            names.GATEWAY_CONTINUATION_OFF,
            "Streams that no other endpoint could go on with, since memory for bodies was short.",
            registry=registry,
        )
        self._template_failures = Counter(
            names.GATEWAY_TEMPLATE_FAILURES,
            "Prompts that a process for chat templates could not render within its limits.",
            [names.LABEL_REASON],
            registry=registry,
        )
        self._forwarded = Counter(
            names.GATEWAY_RESPONSES_FORWARDED,
            "Requests sent to the replica that keeps what they go on from.",
            [names.LABEL_OUTCOME],
            registry=registry,
        )
        self._names_changed = Counter(
            names.GATEWAY_MODEL_NAMES_CHANGED,
            "Bare model names that go from one service to another.",
            [names.LABEL_STATE],
            registry=registry,
        )
        self._source_failures = Counter(
            names.GATEWAY_SOURCE_FAILURES, "Ends of the source of endpoints.", registry=registry
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
        self._queue_wait = Histogram(
            names.GATEWAY_QUEUE_WAIT,
            "Time that requests waited at the gateway for an endpoint with room.",
            model,
            buckets=QUEUE_BUCKETS_S,
            registry=registry,
        )
        self._queue_wait_error = Histogram(
            names.GATEWAY_QUEUE_WAIT_ERROR,
            "Between the wait that was predicted and the one that came, of requests that had to wait.",
            model,
            buckets=QUEUE_BUCKETS_S,
            registry=registry,
        )
        self._queue_refused = Counter(
            names.GATEWAY_QUEUE_REFUSED,
            "Requests turned away because too many wait, or because they waited too long.",
            [*model, names.LABEL_REASON],
            registry=registry,
        )

    def _child(self, metric: Labelled, *labels: str) -> Labelled:
        """Returns a cached series: the library looks it up under a lock, and each request needs five."""
        key = metric, labels
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def answered(self, model: str, status: int, outcome: Outcome, seconds: float) -> None:
        """Counts a request that ended; `model` is "" if it is unknown."""
        self._child(self._requests, model, str(status), outcome.value).inc()
        if outcome is Outcome.OK:
            self._child(self._duration, model).observe(seconds)

    def attempted(self, endpoint: str, outcome: Outcome) -> None:
        """Counts an attempt that ended at an endpoint."""
        self._child(self._attempts, endpoint, outcome.value).inc()

    def remove_endpoint(self, endpoint: str) -> None:
        """Removes the series of an endpoint that was removed."""
        for key in [key for key in self._children if key[0] is self._attempts and key[1][0] == endpoint]:
            del self._children[key]
        self._attempts.remove_by_labels({names.LABEL_ENDPOINT: endpoint})

    def tokenized(self, seconds: float) -> None:
        """Records the time in which a prompt's keys were computed."""
        self._tokenize.observe(seconds)

    def decided(self, reason: str) -> None:
        """Counts a routing decision; a retry is another decision."""
        self._child(self._decisions, reason).inc()

    def prefill_placed(self, model: str, reason: PrefillReason, break_even_tokens: float) -> None:
        """Counts the placement of a prompt's computation; an empty reason means that there was no choice."""
        if reason:
            self._child(self._prefill_placements, model, PLACEMENTS.get(reason, "local"), reason).inc()
        if break_even_tokens < inf:
            self._child(self._break_even, model).set(break_even_tokens)

    def first_token_apart(self, expected_s: float, actual_s: float) -> None:
        """Records the first byte of a stream whose prompt another engine computed."""
        self._child(self._first_token_apart, "expected").observe(expected_s)
        self._child(self._first_token_apart, "actual").observe(actual_s)

    def overhead(self, seconds: float) -> None:
        """Records the gateway's overhead before a request is sent for the first time."""
        self._overhead.observe(seconds)

    def first_byte(self, model: str, seconds: float, prompt_tokens: int, hit_tiers: tuple[int, int, int]) -> None:
        """Records the first body byte from the endpoint that keeps the request, and its hit tokens by tier."""
        self._child(self._first_byte, model).observe(seconds)
        self._child(self._prompt_tokens, model).inc(prompt_tokens)
        self._child(self._hit_tokens, model).inc(sum(hit_tiers))
        for tier, tokens in zip(_TIERS, hit_tiers, strict=True):
            if tokens:
                self._child(self._hit_tier_tokens, model, tier).inc(tokens)

    def returned(self, after: str, seconds: float) -> None:
        """Records a session that returns, by what its last answer was: tool_call or text."""
        self._child(self._return_gap, after).observe(seconds)

    def prefetched(self, outcome: str, sessions: int) -> None:
        """Counts sessions that were announced to their engine, or could not be: sent, failed or dropped."""
        self._child(self._prefetches, outcome).inc(sessions)

    def retried(self, reason: str) -> None:
        """Counts a request that goes to another endpoint."""
        self._retries.labels(reason).inc()

    def continued(self, whole: bool) -> None:
        """Counts a stream that lost its endpoint. `whole` is True if the client received all of it nevertheless."""
        self._continuations.labels("whole" if whole else "broke").inc()

    def poison_refused(self) -> None:
        """Counts a request that was refused because it had ended engines before."""
        self._poison_refused.inc()

    def template_failed(self, reason: str) -> None:
        """Counts a prompt that a process for chat templates could not render within its limits."""
        self._template_failures.labels(reason).inc()

    def forwarded(self, outcome: str) -> None:
        """Counts a request that was forwarded to the replica that stores its earlier response."""
        self._forwarded.labels(outcome).inc()

    def name_changed(self, is_withheld: bool) -> None:
        """Counts a bare model name that goes to another service. `is_withheld` is True if the change is delayed."""
        self._names_changed.labels("held" if is_withheld else "changed").inc()

    def source_failed(self) -> None:
        """Counts a source of endpoints that ended and is started again."""
        self._source_failures.inc()

    def continuation_off(self) -> None:
        """Counts a stream that no other endpoint can continue, since memory for bodies is short."""
        self._continuation_off.inc()

    def queue_waited(self, model: str, seconds: float, predicted_s: float | None) -> None:
        """Records a placed request's wait. `predicted_s` is the prediction; None if it did not have to wait."""
        self._child(self._queue_wait, model).observe(seconds)
        if predicted_s is not None:
            self._child(self._queue_wait_error, model).observe(abs(seconds - predicted_s))

    def queue_refused(self, model: str, reason: str) -> None:
        """Counts a request that was turned away although an endpoint exists for it."""
        self._queue_refused.labels(model, reason).inc()

    def event_gap(self, healed: str) -> None:
        """Counts lost KV events; `healed` is the means by which they were recovered."""
        self._gaps.labels(healed).inc()

    def text(self) -> bytes:
        """Returns all metrics in the exposition format."""
        return generate_latest(self.registry)


class StateCollector:
    """Gauges computed from the gateway's state at each scrape, so that removed endpoints leave no series."""

    def __init__(
        self,
        endpoints: Callable[[], Iterable[EndpointFigures]],
        plugins: Callable[[], Iterable[tuple[str, int, float]]],
        retry_budget: Callable[[], float],
        depths: Callable[[], Mapping[str, int]],
        kept: Callable[[], tuple[int, int]],
    ) -> None:
        """`plugins` yields (name, calls, seconds) of each plugin; `depths` returns the number of waiting requests by
        model.

        `kept` returns the number of stored responses, and their bytes.
        """
        self._endpoints, self._plugins, self._retry_budget = endpoints, plugins, retry_budget
        self._depths, self._kept = depths, kept

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics for prometheus_client."""
        yield from self._by_model(list(self._endpoints()))
        yield from self._by_endpoint(list(self._endpoints()))
        yield GaugeMetricFamily(names.GATEWAY_RETRY_BUDGET, "Retries that may be made now.", self._retry_budget())
        number, size_bytes = self._kept()
        yield GaugeMetricFamily(names.GATEWAY_RESPONSES_KEPT, "Responses that are kept.", number)
        yield GaugeMetricFamily(names.GATEWAY_RESPONSES_KEPT_BYTES, "What they take.", size_bytes)
        calls = CounterMetricFamily(
            names.GATEWAY_PLUGIN_CALLS, "Calls of a routing plugin.", labels=[names.LABEL_PLUGIN]
        )
        seconds = CounterMetricFamily(
            names.GATEWAY_PLUGIN_SECONDS, "Time spent in a routing plugin.", labels=[names.LABEL_PLUGIN]
        )
        for name, count, spent_s in self._plugins():
            calls.add_metric([name], count)
            seconds.add_metric([name], spent_s)
        yield calls
        yield seconds

    def _by_model(self, endpoints: Iterable[EndpointFigures]) -> Iterator[Metric]:
        counts: dict[tuple[str, str], int] = {}
        flights: dict[str, int] = {}
        for one in endpoints:
            counts[one.model, one.state] = counts.get((one.model, one.state), 0) + 1
            flights[one.model] = flights.get(one.model, 0) + one.in_flight
        number = GaugeMetricFamily(names.GATEWAY_ENDPOINTS, "Endpoints.", labels=[names.LABEL_MODEL, names.LABEL_STATE])
        in_flight = GaugeMetricFamily(names.GATEWAY_IN_FLIGHT, "Requests being relayed.", labels=[names.LABEL_MODEL])
        for (model, state), count in counts.items():
            number.add_metric([model, state], count)
        depth = GaugeMetricFamily(names.GATEWAY_QUEUE_DEPTH, "Requests that wait here.", labels=[names.LABEL_MODEL])
        depths = self._depths()
        for model, count in flights.items():
            in_flight.add_metric([model], count)
        for model in flights.keys() | depths.keys():
            depth.add_metric([model], depths.get(model, 0))
        yield number
        yield in_flight
        yield depth

    def _by_endpoint(self, endpoints: Iterable[EndpointFigures]) -> Iterator[Metric]:
        label = [names.LABEL_ENDPOINT]
        in_flight = GaugeMetricFamily(names.GATEWAY_ENDPOINT_IN_FLIGHT, "Requests being relayed.", labels=label)
        circuit = GaugeMetricFamily(names.GATEWAY_CIRCUIT_OPEN, "Left alone.", labels=[*label, names.LABEL_CAUSE])
        lag = GaugeMetricFamily(names.GATEWAY_EVENT_LAG, "Age of the last event at its arrival.", labels=label)
        blocks = GaugeMetricFamily(names.GATEWAY_INDEX_BLOCKS, "Blocks that the index knows of.", labels=label)
        for one in endpoints:
            in_flight.add_metric([one.name], one.in_flight)
            circuit.add_metric([one.name, one.cause or "none"], float(bool(one.cause)))
            lag.add_metric([one.name], one.lag_s)
            blocks.add_metric([one.name], one.index_blocks)
        return iter([in_flight, circuit, lag, blocks])
