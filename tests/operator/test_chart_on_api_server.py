"""A real API server takes what the chart renders, and knows every field of it."""

from typing import Any

import pytest
import yaml

from tests.chart.test_chart import needs_helm, render
from tests.chart.test_options import FULL, rendered
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import wait

pytestmark = [pytest.mark.cluster, needs_helm]


NEED_OTHER_CRDS = {"PodMonitor", "PrometheusRule", "HTTPRoute"}


@pytest.mark.parametrize(
    "settings", [(), ("namespace=default", "gateway.service.type=NodePort", "gateway.service.nodePort=30080")]
)
def test_the_api_server_accepts_the_chart(control_plane: ControlPlane, settings: tuple[str, ...]) -> None:
    is_accepted(control_plane, render(*settings))


def test_the_api_server_accepts_the_chart_when_every_value_is_set(control_plane: ControlPlane) -> None:
    items = [item for item in rendered(f"--values={FULL}") if item["kind"] not in NEED_OTHER_CRDS]
    assert len(items) >= 14
    is_accepted(control_plane, items)


def test_aggregated_roles_grant_the_documented_verbs(plane_with_pods: ControlPlane) -> None:
    plane = plane_with_pods
    roles = [item for item in render() if item["kind"] == "ClusterRole" and "aggregationRule" not in item]
    people = [item for item in roles if any("aggregate-to" in label for label in item["metadata"]["labels"])]
    assert len(people) == 2
    bindings = [binding(role) for role in ("view", "edit", "admin")]
    plane.apply(*people, *bindings)
    try:
        wait(lambda: may(plane, "view", "get") and may(plane, "edit", "create") and may(plane, "admin", "create"))
        for role, verb, resource, allowed in (
            ("view", "watch", "inferencescalers", True),
            ("view", "create", "inferenceservices", False),
            ("edit", "create", "inferencepresets", False),
            ("view", "patch", "inferenceservices/scale", False),
            ("edit", "get", "inferenceservices", True),
            ("edit", "patch", "inferenceservices/scale", True),
            ("edit", "patch", "inferenceservices/status", False),
            ("admin", "delete", "inferencescalers", True),
            ("nobody", "get", "inferenceservices", False),
        ):
            assert may(plane, role, verb, resource) == allowed, (role, verb, resource)
    finally:
        plane.kubectl("delete", "rolebinding", *(item["metadata"]["name"] for item in bindings))
        plane.kubectl("delete", "clusterrole", *(item["metadata"]["name"] for item in people))


def binding(role: str) -> dict[str, Any]:
    """Of Kubernetes' own role of this name, to a user of this name, in the namespace default."""
    api = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{api}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"people-{role}", "namespace": "default"},
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": api, "kind": "User", "name": role}],
    }


def may(plane: ControlPlane, user: str, verb: str, resource: str = "inferenceservices") -> bool:
    """`kubectl auth can-i`."""
    kind, _, subresource = resource.partition("/")
    flags = ["--as", user, "--namespace=default", *([f"--subresource={subresource}"] if subresource else [])]
    return plane.kubectl("auth", "can-i", verb, kind, *flags).stdout.strip() == "yes"


def is_accepted(control_plane: ControlPlane, items: list[dict[str, Any]]) -> None:
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
