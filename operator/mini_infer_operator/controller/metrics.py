"""Exports the operator's metrics to Prometheus, under names of the contract. Decides nothing."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names
from mini_infer_operator.objects.start_stages import StartStages

RECONCILE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0)
START_BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
ROLLOUT_BUCKETS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

Gauge = tuple[str, str, tuple[str, ...], Callable[[], Mapping[tuple[str, ...], float]]]
"""A gauge's name, help text and label names, and a function that returns its values by label values."""


class OperatorMetrics:
    """The metrics of one operator."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # A second series for each, which nothing of ours reads.
        self.registry = registry = CollectorRegistry()
        self._passes = Counter(
            names.OPERATOR_RECONCILES, "Passes over one service.", [names.LABEL_RESULT], registry=registry
        )
        self._errors = Counter(
            names.OPERATOR_RECONCILE_ERRORS, "Passes that failed.", [names.LABEL_REASON], registry=registry
        )
        self._duration = Histogram(
            names.OPERATOR_RECONCILE_DURATION,
            "One pass over one service.",
            buckets=RECONCILE_BUCKETS_S,
            registry=registry,
        )
        self._rollouts = Histogram(
            names.OPERATOR_ROLLOUT_DURATION,
            "From Progressing=True to nothing left to do.",
            [names.LABEL_REASON],
            buckets=ROLLOUT_BUCKETS_S,
            registry=registry,
        )
        self._starts = Histogram(
            names.OPERATOR_ENGINE_START,
            "Starts of engines, by stage.",
            [names.LABEL_STAGE],
            buckets=START_BUCKETS_S,
            registry=registry,
        )
        self._requests = Counter(
            names.OPERATOR_API_REQUESTS,
            "Requests to the API server.",
            [names.LABEL_VERB, names.LABEL_KIND, names.LABEL_STATUS],
            registry=registry,
        )
        for result in ("ok", "error"):
            self._passes.labels(result)  # a rate needs a zero to begin with

    def pass_ended(self, seconds: float, error: Exception | None) -> None:
        """Records a pass over one service: its duration, and the error that it raised, or None."""
        self._duration.observe(seconds)
        self._passes.labels("error" if error else "ok").inc()
        if error is not None:
            self._errors.labels(getattr(error, "reason", "") or type(error).__name__).inc()

    def rollout_ended(self, reason: str, seconds: float) -> None:
        """Records a rollout that ended after `seconds`; `reason` is that of its Progressing condition."""
        self._rollouts.labels(reason).observe(seconds)

    def engine_started(self, stages: StartStages) -> None:
        """Records the start of an engine."""
        for stage, seconds in stages.by_name.items():
            self._starts.labels(stage).observe(seconds)

    def request_seen(self, method: str, path: str, query: Mapping[str, str], status: int | None) -> None:
        """Counts a request to the API server; `status` is None if no answer came."""
        plural, named = plural_of(path)
        verb = _VERBS.get(method, "get" if named else "list")
        verb = "watch" if query.get("watch") else verb
        self._requests.labels(verb, plural, "" if status is None else str(status)).inc()

    def gauges(self, *gauges: Gauge) -> None:
        """Exports gauges that are computed at each scrape."""
        self.registry.register(_Gauges(gauges))

    def exposition(self) -> bytes:
        """Returns the body that `/metrics` answers."""
        return generate_latest(self.registry)


class _Gauges:
    def __init__(self, gauges: tuple[Gauge, ...]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """Yields each gauge with its values of now, for prometheus_client's registry."""
        for name, text, labels, read in self._gauges:
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, number in read().items():
                family.add_metric(values, number)
            yield family


def plural_of(path: str) -> tuple[str, bool]:
    """Returns the plural in an API path, and True if the path names one object: ("pods", False) for /api/v1/pods."""
    parts = [part for part in path.split("/") if part]
    rest = parts[2:] if parts[:1] == ["api"] else parts[3:]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    return (rest[0], len(rest) > 1) if rest else ("", True)  # else a path of discovery
