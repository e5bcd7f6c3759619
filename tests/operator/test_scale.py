"""`kubectl scale`, autoscalers and people's own manifests change the number of engines; the operator never does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operator.test_cluster import Cluster, cluster, wait
from tests.support.services import changed
from tests.support.stub_metrics import GROUP, StubMetrics

EXAMPLES = Path(__file__).parents[2] / "examples/autoscaling"
__all__ = ["cluster"]  # a fixture, used by name
pytestmark = [pytest.mark.cluster]


def replicas(cluster: Cluster, name: str) -> int:
    found = json.loads(cluster.plane.kubectl("get", "infsvc", name, "-o", "json").stdout)
    return int(found["spec"]["unified"]["replicas"])


def ready_engines(cluster: Cluster, name: str) -> int:
    return int(cluster.status(name).get("readyReplicas", 0))


def manifest_without_replicas(name: str) -> dict[str, Any]:
    manifest = changed({"metadata": {"name": name}})
    del manifest["spec"]["unified"]["replicas"]
    return manifest


def test_kubectl_scale_changes_the_replicas(cluster: Cluster) -> None:
    cluster.apply("byhand", unified={"replicas": 1})
    wait(lambda: ready_engines(cluster, "byhand") == 1)
    scaled = cluster.plane.kubectl("scale", "infsvc/byhand", "--replicas=3")
    assert scaled.returncode == 0, scaled.stderr
    wait(lambda: ready_engines(cluster, "byhand") == 3)
    scale = json.loads(cluster.plane.kubectl("get", "infsvc/byhand", "--subresource=scale", "-o", "json").stdout)
    assert scale["status"]["replicas"] == 3
    pods = cluster.get("pods", scale["status"]["selector"])
    assert len(pods) == 3
    assert {pod["metadata"]["labels"]["serving.mini-infer.io/service"] for pod in pods} == {"byhand"}


def test_replicas_stay_when_a_manifest_leaves_them_out(cluster: Cluster) -> None:
    manifest = yaml.safe_dump(manifest_without_replicas("gitops"))
    apply = ("apply", "--server-side", "--field-manager=gitops", "-f", "-")
    cluster.plane.kubectl(*apply, stdin=manifest)
    wait(lambda: ready_engines(cluster, "gitops") == 1)
    cluster.plane.kubectl("scale", "infsvc/gitops", "--replicas=2")
    wait(lambda: ready_engines(cluster, "gitops") == 2)
    again = cluster.plane.kubectl(*apply, stdin=manifest)
    assert again.returncode == 0, again.stderr
    assert replicas(cluster, "gitops") == 2


def test_an_inference_scaler_sets_the_replicas_of_its_role(cluster: Cluster) -> None:
    cluster.apply("byrole", unified={"replicas": 2})
    wait(lambda: ready_engines(cluster, "byrole") == 2)
    spec = {"service": "byrole", "role": "unified"}
    scaler = {"apiVersion": "serving.mini-infer.io/v1alpha1", "kind": "InferenceScaler", "spec": spec}
    cluster.plane.apply({**scaler, "metadata": {"name": "byrole-unified", "namespace": "default"}})

    def scale() -> dict[str, Any]:
        read = cluster.plane.kubectl("get", "infscaler/byrole-unified", "--subresource=scale", "-o", "json")
        return dict(json.loads(read.stdout))

    # the role's own number, written once; until then the API server has no /scale of it
    wait(lambda: [found["spec"].get("replicas") for found in cluster.get("infscaler")] == [2])
    assert scale()["spec"]["replicas"] == 2
    (written,) = cluster.get("infscaler")
    managed = written["metadata"]["managedFields"]
    writers = {m["manager"] for m in managed if "f:replicas" in m["fieldsV1"].get("f:spec", {})}
    assert writers == {"mini-infer-operator"}
    wait(lambda: scale()["status"].get("replicas") == 2)
    assert cluster.plane.kubectl("scale", "infscaler/byrole-unified", "--replicas=3").returncode == 0
    wait(lambda: ready_engines(cluster, "byrole") == 3)
    assert replicas(cluster, "byrole") == 2
    wait(lambda: scale()["status"]["replicas"] == 3)
    assert len(cluster.get("pods", scale()["status"]["selector"])) == 3
    assert cluster.plane.kubectl("delete", "infscaler/byrole-unified").returncode == 0
    wait(lambda: ready_engines(cluster, "byrole") == 2)


def test_an_inference_scaler_says_so_when_its_service_does_not_exist(cluster: Cluster) -> None:
    spec = {"service": "nobody", "role": "unified"}
    scaler = {"apiVersion": "serving.mini-infer.io/v1alpha1", "kind": "InferenceScaler", "spec": spec}
    cluster.plane.apply({**scaler, "metadata": {"name": "lost", "namespace": "default"}})

    def status() -> dict[str, Any]:
        (found,) = (item for item in cluster.get("infscaler") if item["metadata"]["name"] == "lost")
        return dict(found.get("status", {}))

    wait(lambda: status() == {"message": "there is no InferenceService nobody in namespace default"})
    cluster.apply("nobody", unified={"replicas": 1})
    wait(lambda: status().get("replicas") == 1)
    assert cluster.plane.kubectl("delete", "infsvc/nobody").returncode == 0
    wait(lambda: "there is no InferenceService" in status().get("message", ""))
    assert cluster.plane.kubectl("delete", "infscaler/lost").returncode == 0


def test_the_api_server_accepts_the_examples_autoscaler(cluster: Cluster) -> None:
    applied = cluster.plane.kubectl("apply", "--server-side", "--dry-run=server", "-f", str(EXAMPLES / "hpa.yaml"))
    assert applied.returncode == 0, applied.stderr


@pytest.fixture
def waiting(cluster: Cluster, tmp_path: Path) -> Iterator[dict[str, float]]:
    """How many requests wait in each engine: `total` shared evenly by the pods that match, as a gateway would."""
    reported = {"total": 0.0}

    def values(metric: str, selector: str) -> dict[str, float]:
        pods = [pod["metadata"]["name"] for pod in cluster.get("pods", selector)]
        total = reported["total"] if metric == "requests_waiting" else 0.0
        return {pod: total / len(pods) for pod in pods}

    try:
        stub = StubMetrics(tmp_path, ["requests_waiting", "requests_running"], values)
    except OSError as error:
        pytest.skip(f"this machine has no address but loopback: {error}")
    stub.start()
    try:
        cluster.plane.apply(*stub.manifests())
        yield reported
    finally:
        cluster.plane.kubectl("delete", "apiservice", f"v1beta1.{GROUP}")
        stub.stop()


@pytest.mark.timeout(600)
def test_the_examples_autoscaler_scales_up_when_queues_grow(cluster: Cluster, waiting: dict[str, float]) -> None:
    """From two to three: the example lets their number double once a minute."""
    cluster.apply("demo", unified={"replicas": 2})
    wait(lambda: ready_engines(cluster, "demo") == 2)
    taken = cluster.plane.kubectl("apply", "--server-side", "-f", str(EXAMPLES / "hpa.yaml"))
    assert taken.returncode == 0, taken.stderr

    def conditions() -> dict[str, str]:
        (autoscaler,) = cluster.get("hpa")
        return {c["type"]: c["status"] for c in autoscaler.get("status", {}).get("conditions", ())}

    wait(lambda: conditions().get("ScalingActive") == "True", limit_s=150)
    assert conditions()["AbleToScale"] == "True"
    assert replicas(cluster, "demo") == 2
    waiting["total"] = 5.0  # the example aims at two in each engine
    wait(lambda: ready_engines(cluster, "demo") == 3, limit_s=150)
    assert replicas(cluster, "demo") == 3
    cluster.plane.kubectl("delete", "hpa", "demo")
