"""A real API server takes what the chart renders, and knows every field of it."""

import pytest
import yaml

from tests.chart.test_chart import needs_helm, render
from tests.support.control_plane import ControlPlane

pytestmark = [pytest.mark.cluster, needs_helm]


@pytest.mark.parametrize(
    "settings", [(), ("namespace=default", "gateway.service.type=NodePort", "gateway.service.nodePort=30080")]
)
def test_the_chart_is_taken(control_plane: ControlPlane, settings: tuple[str, ...]) -> None:
    manifests = [item | {"metadata": item["metadata"] | {"namespace": "default"}} for item in render(*settings)]
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
