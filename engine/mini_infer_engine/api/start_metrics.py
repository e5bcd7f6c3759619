"""Metrics of an engine's start and of its weights, as /metrics shows them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core_process.messages import ModelInfo


def start_families(model: ModelInfo, stats: EngineStats) -> Iterator[Metric]:
    """Yields all families; an engine without a model, as in a dry run, has no stages."""
    stages = GaugeMetricFamily(names.ENGINE_START, "Seconds of each stage of the start.", labels=["stage"])
    for stage, seconds in model.start_seconds.items():
        stages.add_metric([stage], seconds)
    yield stages
    for name, documentation, value in (
        (names.ENGINE_WEIGHTS_LOADED_BYTES, "Bytes of weights, by their source.", model.weights.num_bytes),
        (names.ENGINE_WEIGHTS_LOAD_SECONDS, "Seconds of loading them.", model.weights.seconds),
    ):
        family = GaugeMetricFamily(name, documentation, labels=["source"])
        if model.weights.num_bytes:
            family.add_metric([model.weights.source], value)
        yield family
    yield CounterMetricFamily(
        names.ENGINE_WEIGHTS_SENT_BYTES, "Bytes of weights sent to engines that start.", stats.weights_sent_bytes
    )
