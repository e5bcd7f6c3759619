"""`kubectl scale`, autoscalers and people's own manifests change the number of engines; the operator never does."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operator.test_cluster import Cluster, cluster, wait
from tests.support.services import changed

EXAMPLES = Path(__file__).parents[2] / "examples/autoscaling"
__all__ = ["cluster"]  # a fixture, used by name
pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]


def replicas(cluster: Cluster, name: str) -> int:
    found = json.loads(cluster.plane.kubectl("get", "infsvc", name, "-o", "json").stdout)
    return int(found["spec"]["unified"]["replicas"])


def ready_engines(cluster: Cluster, name: str) -> int:
    return int(cluster.status(name).get("readyReplicas", 0))


def manifest_without_replicas(name: str) -> dict[str, Any]:
    manifest = changed({"metadata": {"name": name}})
    del manifest["spec"]["unified"]["replicas"]
    return manifest


def test_kubectl_scale(cluster: Cluster) -> None:
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


def test_a_manifest_without_replicas_leaves_them_to_whoever_set_them(cluster: Cluster) -> None:
    manifest = yaml.safe_dump(manifest_without_replicas("gitops"))
    apply = ("apply", "--server-side", "--field-manager=gitops", "-f", "-")
    cluster.plane.kubectl(*apply, stdin=manifest)
    wait(lambda: ready_engines(cluster, "gitops") == 1)
    cluster.plane.kubectl("scale", "infsvc/gitops", "--replicas=2")
    wait(lambda: ready_engines(cluster, "gitops") == 2)
    again = cluster.plane.kubectl(*apply, stdin=manifest)
    assert again.returncode == 0, again.stderr
    assert replicas(cluster, "gitops") == 2


def test_the_examples_autoscaler_is_taken(cluster: Cluster) -> None:
    taken = cluster.plane.kubectl("apply", "--server-side", "--dry-run=server", "-f", str(EXAMPLES / "hpa.yaml"))
    assert taken.returncode == 0, taken.stderr


@pytest.mark.slow
def test_a_horizontal_pod_autoscaler_attaches(cluster: Cluster) -> None:
    cluster.apply("auto", unified={"replicas": 1})
    wait(lambda: ready_engines(cluster, "auto") == 1)
    metric = {"type": "Pods", "pods": {"metric": {"name": "waiting"}, "target": {"type": "AverageValue"}}}
    metric["pods"]["target"]["averageValue"] = "2"  # type: ignore[index]
    cluster.plane.apply(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "auto", "namespace": "default"},
            "spec": {
                "scaleTargetRef": {
                    "apiVersion": "serving.mini-infer.io/v1alpha1",
                    "kind": "InferenceService",
                    "name": "auto",
                },
                "minReplicas": 3,
                "maxReplicas": 5,
                "metrics": [metric],
            },
        }
    )
    wait(lambda: ready_engines(cluster, "auto") == 3, limit_s=60)
    (autoscaler,) = cluster.get("hpa")
    conditions = {c["type"]: (c["status"], c["reason"]) for c in autoscaler["status"]["conditions"]}
    assert conditions["AbleToScale"][0] == "True"
    assert autoscaler["status"]["currentReplicas"] in {1, 3}
    cluster.plane.kubectl("delete", "hpa", "auto")
