"""A real API server takes what the chart renders, and knows every field of it."""

from typing import Any

import pytest
import yaml

from tests.chart.test_chart import needs_helm, render
from tests.chart.test_options import FULL, rendered
from tests.support.control_plane import ControlPlane

pytestmark = [pytest.mark.cluster, needs_helm]


NEED_OTHER_CRDS = {"PodMonitor", "PrometheusRule", "HTTPRoute"}


@pytest.mark.parametrize(
    "settings", [(), ("namespace=default", "gateway.service.type=NodePort", "gateway.service.nodePort=30080")]
)
def test_the_chart_is_taken(control_plane: ControlPlane, settings: tuple[str, ...]) -> None:
    is_taken(control_plane, render(*settings))


def test_every_value_at_once_is_taken(control_plane: ControlPlane) -> None:
    items = [item for item in rendered(f"--values={FULL}") if item["kind"] not in NEED_OTHER_CRDS]
    assert len(items) >= 14
    is_taken(control_plane, items)


def is_taken(control_plane: ControlPlane, items: list[dict[str, Any]]) -> None:
    control_plane.kubectl(
        "create", "serviceaccount", "default"
    )  # a controller makes it, sooner or later, where one runs
    manifests = [item | {"metadata": item["metadata"] | {"namespace": "default"}} for item in items]
    result = control_plane.kubectl(
        "apply",
        "--server-side",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
        stdin=yaml.safe_dump_all(manifests),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("serverside-applied (server dry run)") == len(manifests)
