"""Dashboards and rules ask only for what a loaded platform exports, by name and by label."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from scripts.dashboards import DASHBOARDS, text
from tests.chart.loaded_platform import loaded_platform
from tests.chart.promql import Reads, reads
from tests.chart.test_chart import CHART, ROOT, needs_helm, of_kind
from tests.chart.test_options import rendered

RULES = CHART / "rules/mini-infer.yaml"
AUTOSCALING = ROOT / "examples/autoscaling"
TARGET_LABELS = {"namespace", "pod"}
"""Added by every scrape of pods: PodMonitors do so by themselves, scrapes by annotation with the usual relabelling."""
NOT_SEEN_HERE = {"mini_infer_gateway_event_gaps_total": {"healed"}}
"""Metrics that are declared and have no value where nothing was lost, with the labels that they would have."""

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


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    with loaded_platform(tmp_path_factory.mktemp("platform")) as platform:
        scraped = platform.scrape()
    found: Exported = {}
    for exposition in scraped.values():
        declared = set()
        for family in text_string_to_metric_families(exposition):
            declared.add(family.name)
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        for name, labels in NOT_SEEN_HERE.items():
            if name.removesuffix("_total") in declared:
                found.setdefault(name, set()).update(labels)
    for name, expression in recorded().items():
        found[name] = set(reads(expression).labels) - {"le", "status"}
    return found


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_what_is_asked_for_is_exported(exported: Exported, place: str) -> None:
    asked = reads(EXPRESSIONS[place])
    assert asked.metrics, EXPRESSIONS[place]
    assert asked.metrics - exported.keys() == set(), "no such metric in a loaded platform"
    known = TARGET_LABELS.union(*(exported[metric] for metric in asked.metrics))
    assert asked.labels - known == set(), "no such label on these metrics"


@pytest.mark.parametrize(
    ("expression", "metrics", "labels"),
    [
        ('sum by (a, b) (rate(m_total{c=~"x", d!="by (y)"}[5m])) / n', {"m_total", "n"}, {"a", "b", "c", "d"}),
        ("level:m:rate5m and on (a) vllm:n unless 0 * p > 1e3", {"level:m:rate5m", "vllm:n", "p"}, {"a"}),
        ("histogram_quantile(0.9, sum by (le) (rate(h_bucket[$__rate_interval])))", {"h_bucket"}, {"le"}),
        ("absent(m)", {"m"}, set()),
    ],
)
def test_expressions_are_taken_apart(expression: str, metrics: set[str], labels: set[str]) -> None:
    assert reads(expression) == Reads(frozenset(metrics), frozenset(labels))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_files_are_what_the_tables_say(dashboard: Any) -> None:
    assert (CHART / f"dashboards/{dashboard.name}.json").read_text() == text(dashboard), "run: make dashboards"


def test_panels_do_not_overlap() -> None:
    for dashboard in DASHBOARDS:
        cells: set[tuple[int, int]] = set()
        for panel in json.loads(text(dashboard))["panels"]:
            place = panel["gridPos"]
            mine = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not mine & cells, f"{dashboard.name}: {panel['title']}"
            assert place["x"] + place["w"] <= 24
            cells |= mine


@pytest.mark.cluster
@needs_helm
def test_dashboards_become_config_maps() -> None:
    maps = of_kind(rendered("--set=monitoring.dashboards.enabled=true"), "ConfigMap")
    assert set(maps) == {f"mini-infer-dashboard-{dashboard.name}" for dashboard in DASHBOARDS}
    for dashboard in DASHBOARDS:
        item = maps[f"mini-infer-dashboard-{dashboard.name}"]
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert item["data"] == {f"mini-infer-{dashboard.name}.json": text(dashboard)}
