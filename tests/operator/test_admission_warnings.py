"""What the chart's policy warns of, on a real API server, which stores it all the same."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.test_chart import needs_helm, render
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import wait
from tests.support.services import changed

pytestmark = [pytest.mark.cluster, needs_helm]
KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
ON_A_GPU = {"replicas": 2, "resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"memory": "32Gi"}}}
QUIET: dict[str, Any] = {"model": {"uri": "hf://a/b@1"}, "image": "example.org:5000/engine:1", "unified": ON_A_GPU}


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    policies = [item for item in render() if item["kind"] in KINDS]
    assert [item["kind"] for item in policies] == [*KINDS]
    control_plane.apply(*policies)
    wait(lambda: "one engine" in warnings_of(control_plane, {"unified": {"replicas": 1}}))
    yield control_plane
    for item in policies:
        control_plane.kubectl("delete", item["kind"], item["metadata"]["name"])


def warnings_of(plane: ControlPlane, spec: dict[str, Any]) -> str:
    service = changed({"metadata": {"name": "warned", "namespace": "default"}, "spec": spec})
    done = plane.kubectl("create", "--dry-run=server", "-f=-", stdin=json.dumps(service))
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_nothing_is_printed_when_a_service_is_well_configured(plane: ControlPlane) -> None:
    assert warnings_of(plane, QUIET) == ""
    apart = {"prefill": ON_A_GPU, "decode": ON_A_GPU, "unified": None}
    assert warnings_of(plane, {**QUIET, **apart}) == ""


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"unified": {"replicas": 1}}, "a role has one engine"),
        ({"disruptionBudget": {"enabled": False}}, "there is no disruption budget"),
        (
            {"unified": {"template": {"container": {"startupProbe": {"periodSeconds": 2, "failureThreshold": 30}}}}},
            "startupProbe gives an engine on GPUs less than two minutes",
        ),
        ({"unified": {"resources": {"requests": {"memory": None, "cpu": 1}}}}, "requests no memory"),
        ({"unified": {"template": {"spec": {"terminationGracePeriodSeconds": 12}}}}, "is below 30"),
        ({"model": {"uri": "hf://a/b"}}, "names no revision"),
        ({"image": "example.org:5000/engine"}, "image has no tag"),
        ({"image": "engine:latest"}, "image has no tag, or latest"),
    ],
)
def test_one_warning_is_printed_when_a_service_will_work_badly(
    plane: ControlPlane, change: dict[str, Any], warning: str
) -> None:
    printed = warnings_of(plane, changed(change, QUIET))
    lines = [line for line in printed.splitlines() if line.startswith("Warning:")]
    assert len(lines) == 1, printed
    assert warning in lines[0]


@pytest.mark.parametrize(
    "change",
    [
        {"unified": {"template": {"container": {"startupProbe": {"periodSeconds": 2}}}}},
        {"unified": {"resources": {"requests": None, "limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}}}},
        {"disruptionBudget": {"enabled": False}, "unified": {"replicas": 0}},
        {"image": f"example.org/engine@sha256:{'0' * 64}"},
        {"unified": {"replicas": 2, "resources": None}},
    ],
)
def test_nothing_is_printed_when_a_default_or_another_field_provides(
    plane: ControlPlane, change: dict[str, Any]
) -> None:
    assert warnings_of(plane, changed(change, QUIET)) == ""


def test_there_is_no_policy_when_the_chart_may_write_in_one_namespace_only() -> None:
    assert not [item for item in render("namespace=default") if item["kind"] in KINDS]
