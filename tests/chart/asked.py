"""What dashboards, rules and examples ask of Prometheus, and what an exposition has to offer."""

import json
import re
from collections.abc import Iterable, Iterator

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.chart.promql import reads
from tests.chart.test_chart import CHART, ROOT

RULES = CHART / "rules/mini-infer.yaml"
AUTOSCALING = ROOT / "examples/autoscaling"
TARGET_LABELS = {"namespace", "pod"}
"""Added by every scrape of pods: PodMonitors do so by themselves, scrapes by annotation with the usual relabelling."""
NOT_SEEN_HERE = {
    "mini_infer_gateway_event_gaps_total": {"healed"},
    "mini_infer_gateway_queue_refused_total": {"model", "reason"},
    "mini_infer_gateway_prefill_placements_total": {"model", "placement", "reason"},
    "mini_infer_gateway_prefill_break_even_tokens": {"model"},
    "mini_infer_gateway_first_token_apart_seconds_sum": {"kind"},
    "mini_infer_gateway_first_token_apart_seconds_count": {"kind"},
    "mini_infer_operator_reconcile_errors_total": {"reason"},
    "mini_infer_engine_kv_tier_hit_tokens_total": {"tier"},
    "mini_infer_engine_kv_tier_moved_bytes_total": {"tier", "direction"},
    "mini_infer_engine_kv_tier_bytes": {"tier"},
    "mini_infer_engine_kv_tier_capacity_bytes": {"tier"},
    "mini_infer_engine_kv_tier_on": {"tier"},
    "mini_infer_engine_kv_tier_prefetch_used_tokens_total": {"tier"},
    "mini_infer_engine_kv_tier_prefetch_wasted_tokens_total": {"tier"},
    "mini_infer_engine_kv_tier_mismatches_total": {"tier"},
}
"""Metrics that are declared and have no value where nothing was lost, no engine computes for another and the KV cache
has no lower tiers, with the labels that they would have."""

Exported = dict[str, set[str]]
"""Labels by the name of a series."""


def recorded() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression and where it stands."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"rule {rule.get('alert') or rule['record']}", rule["expr"]
    for path in sorted((CHART / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']} ({target['refId']})", target["expr"]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
                yield f"{path.stem}: ${variable['name']}", f"count by ({label}) ({metric})"
    for series, query in adapter_rules():
        yield f"adapter: {series}", query
    for trigger in yaml.safe_load((AUTOSCALING / "keda.yaml").read_text())["spec"]["triggers"]:
        yield f"keda: {trigger['metadata']['query']}", trigger["metadata"]["query"]


def adapter_rules() -> Iterator[tuple[str, str]]:
    """What the Prometheus adapter asks: its series, and its query for one of them."""
    for rule in yaml.safe_load((AUTOSCALING / "prometheus-adapter.yaml").read_text())["rules"]["custom"]:
        series = rule["seriesQuery"]
        yield series, series
        name, matchers = re.fullmatch(r"([\w:]+)\{(.*)\}", series).groups()  # type: ignore[union-attr]  # it has both
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.Series>>", name)
        yield f"{series}, asked", query.replace("<<.LabelMatchers>>", matchers)


EXPRESSIONS = dict(expressions())
OPERATOR = "mini_infer_operator_"


def of_the_operator(place: str) -> bool:
    """Whether an expression reads the operator's metrics, which need an API server."""
    return any(metric.startswith(OPERATOR) for metric in reads(EXPRESSIONS[place]).metrics)


def exported_by(expositions: Iterable[str]) -> Exported:
    """Series and their labels, recorded ones included."""
    found: Exported = {}
    for exposition in expositions:
        declared = set()
        for family in text_string_to_metric_families(exposition):
            declared.add(family.name)
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        for name, labels in NOT_SEEN_HERE.items():
            if re.sub("_(total|sum|count)$", "", name) in declared:
                found.setdefault(name, set()).update(labels)
    for name, expression in recorded().items():
        found[name] = set(reads(expression).labels) - {"le", "outcome"}
    return found


def check(exported: Exported, place: str) -> None:
    """AssertionError where an expression asks for a metric or a label that is not exported."""
    expression = reads(EXPRESSIONS[place])
    assert expression.metrics, EXPRESSIONS[place]
    assert expression.metrics - exported.keys() == set(), "no such metric in a loaded platform"
    known = TARGET_LABELS.union(*(exported[metric] for metric in expression.metrics))
    assert expression.labels - known == set(), "no such label on these metrics"
