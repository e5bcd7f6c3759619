"""Dashboards and rules ask only for what a loaded platform exports, by name and by label."""

import json
from typing import Any

import pytest

from scripts.dashboards import DASHBOARDS, text
from tests.chart.asked import EXPRESSIONS, Exported, check, exported_by, of_the_operator
from tests.chart.loaded_platform import loaded_platform
from tests.chart.promql import Reads, reads
from tests.chart.test_chart import CHART, needs_helm, of_kind
from tests.chart.test_options import rendered


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    with loaded_platform(tmp_path_factory.mktemp("platform")) as platform:
        return exported_by(platform.scrape().values())


@pytest.mark.parametrize("place", [place for place in EXPRESSIONS if not of_the_operator(place)])
def test_every_queried_metric_is_exported(exported: Exported, place: str) -> None:
    check(exported, place)  # the operator's: tests/operator/test_metrics_asked_for.py


@pytest.mark.parametrize(
    ("expression", "metrics", "labels"),
    [
        ('sum by (a, b) (rate(m_total{c=~"x", d!="by (y)"}[5m])) / n', {"m_total", "n"}, {"a", "b", "c", "d"}),
        ("level:m:rate5m and on (a) vllm:n unless 0 * p > 1e3", {"level:m:rate5m", "vllm:n", "p"}, {"a"}),
        ("histogram_quantile(0.9, sum by (le) (rate(h_bucket[$__rate_interval])))", {"h_bucket"}, {"le"}),
        ("absent(m)", {"m"}, set()),
    ],
)
def test_promql_expressions_are_parsed(expression: str, metrics: set[str], labels: set[str]) -> None:
    assert reads(expression) == Reads(frozenset(metrics), frozenset(labels))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_dashboard_files_equal_their_tables(dashboard: Any) -> None:
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
