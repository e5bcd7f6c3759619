"""Objects that the operator makes and the chart renders have only fields that Kubernetes 1.30 to 1.36 know.

`make test-kubernetes` compares everything with every version; `make test` with the oldest and the newest.
"""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_infer_operator.crd import custom_resource_definitions
from mini_infer_operator.objects.model_cache import model_cache_job
from mini_infer_operator.objects.render import render
from mini_infer_operator.observe import Observed
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.presets.resolve import resolve_service
from mini_infer_operator.settings import EnginePeers
from tests.chart.test_chart import needs_helm, templates
from tests.support.kubernetes_schemas import VERSIONS, faults, is_known
from tests.support.services import changed

ROOT = Path(__file__).parents[2]
SERVICES = sorted([*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "tests/operator/data").glob("*.in.yaml")])
PEERS = EnginePeers(({"podSelector": {}},), ({"podSelector": {}},))
CHARTS = {
    "defaults": (),
    "one namespace": ("namespace=here", "rbac.aggregate=false"),
    "all that is off": (
        "gateway.ingress.enabled=true",
        "gateway.autoscaling.enabled=true",
        "networkPolicy.enabled=true",
        "monitoring.dashboards.enabled=true",
    ),
}
SINCE = {
    "Deployment.spec.template.spec.volumes[*].image": "1.31",
    "Deployment.spec.template.spec.resourceClaims[*].resourceClaimTemplateName": "1.31",
}
"""Fields of a version after the first, which services have that ask for them: oci:// models, and resourceClaims."""
SAMPLED = [pytest.param(v, marks=() if v in {VERSIONS[0], VERSIONS[-1]} else pytest.mark.kubernetes) for v in VERSIONS]


def manifests_of(path: Path) -> list[dict[str, Any]]:
    """Returns a file's own objects of Kubernetes, and those that the operator makes of its services."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    found = [document for document in documents if "apiVersion" in document and is_known(document)]
    presets = [document for document in documents if document.get("kind") == "InferencePreset"]
    stored = {"metadata": {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}
    for document in documents:
        if document.get("kind") != "InferenceService":
            continue
        service = resolve_service(changed(stored, document), presets).service
        plan = make_plan(service, Observed(default_image="engine:1"), datetime.now(UTC))
        launches = [workload.launch for workload in plan.workloads if workload.launch is not None]
        job = model_cache_job(service, launches[0], None, ())
        found += [*render(service, plan, {}, "IfNotPresent", PEERS), *([job] if job is not None else [])]
    return [manifest for manifest in found if is_known(manifest)]


@pytest.mark.usefixtures("everything_works")
@pytest.mark.parametrize("version", SAMPLED)
def test_every_version_knows_the_fields_of_what_the_operator_makes(version: str) -> None:
    kinds = set()
    for path in SERVICES:
        for manifest in manifests_of(path):
            kinds.add(manifest["kind"])
            expected = {f"{name}: there is no such field" for name, since in SINCE.items() if since > version}
            found = {re.sub(r"\[\d+\]", "[*]", line) for line in faults(manifest, version)}
            assert found <= expected, (path.name, found - expected)
    assert kinds >= {"Deployment", "Service", "Job", "ControllerRevision", "PodDisruptionBudget", "NetworkPolicy"}


@pytest.mark.parametrize("version", SAMPLED)
def test_every_version_knows_the_fields_of_the_crds(version: str) -> None:
    assert [line for crd in custom_resource_definitions() for line in faults(crd, version)] == []


@needs_helm
@pytest.mark.cluster
@pytest.mark.parametrize("settings", CHARTS.values(), ids=CHARTS)
@pytest.mark.parametrize("version", SAMPLED)
def test_every_version_knows_the_fields_of_what_the_chart_renders(version: str, settings: tuple[str, ...]) -> None:
    items = templates(*settings, version=f"{version}.0")
    unknown = {item["kind"] for item in items if not is_known(item)}
    assert unknown <= {"HTTPRoute", "PodMonitor", "ServiceMonitor", "PrometheusRule"}
    assert [line for item in items if is_known(item) for line in faults(item, version)] == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spec": {"ports": [{"port": 80, "hostPort": 80}]}}, "Service.spec.ports[0].hostPort: there is no such field"),
        ({"spec": {"ports": [{"port": "80"}]}}, "Service.spec.ports[0].port: '80' is no int"),
        ({"spec": {"ports": [{"name": "http"}]}}, "Service.spec.ports[0].port: is missing"),
        ({"spec": {"ports": 80}}, "Service.spec.ports: 80 is no list[V1ServicePort]"),
        ({"metadata": {"labels": {"a": 1}}}, "Service.metadata.labels[a]: 1 is no str"),
    ],
)
def test_a_fault_is_found_when_an_object_has_one(change: dict[str, Any], fault: str) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}]}}
    assert faults(service, "1.36") == []
    assert faults(changed(change, service), "1.36") == [fault]


def test_a_field_is_unknown_to_the_versions_before_it() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {"containers": [{"name": "a"}]}}
    volume = changed({"spec": {"volumes": [{"name": "m", "image": {"reference": "a:1"}}]}}, pod)
    assert [bool(faults(volume, version)) for version in VERSIONS] == [True] + [False] * (len(VERSIONS) - 1)
