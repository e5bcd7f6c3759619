"""Dashboards and rules ask only for what an operator exports that has brought a service up on a real API server."""

import urllib.request

import pytest

from tests.chart.asked import EXPRESSIONS, Exported, check, exported_by, of_the_operator
from tests.operator.test_cluster import Cluster, cluster, wait

__all__ = ["cluster"]  # a fixture, used by name
pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def exported(cluster: Cluster) -> Exported:
    cluster.apply("measured")
    wait(lambda: cluster.ready("measured").get("status") == "True", limit_s=60)
    with urllib.request.urlopen(f"{cluster.operator_url}/metrics", timeout=60) as answer:
        return exported_by([answer.read().decode()])


@pytest.mark.parametrize("place", [place for place in EXPRESSIONS if of_the_operator(place)])
def test_every_queried_metric_is_exported(exported: Exported, place: str) -> None:
    check(exported, place)
