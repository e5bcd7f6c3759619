"""Engines of a real API server's pods that switch roles: nothing undoes it, and another operator goes on with it."""

import urllib.request
from pathlib import Path

import pytest

from tests.operator.test_scaling import StubGateway, gateway
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import Cluster, OperatorProcess, wait

__all__ = ["gateway"]  # a fixture, used by name
pytestmark = [pytest.mark.cluster]

PAIR = {"minReplicas": 1, "maxReplicas": 3, "windows": {"downSeconds": 600}}
ROLE, CURRENT = "serving.mini-infer.io/role", "serving.mini-infer.io/current-role"


def pods_by_role(cluster: Cluster, name: str) -> dict[str, set[str]]:
    """Returns the names of ready pods by the role that each has now."""
    found: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    for pod in cluster.children(name, "pods"):
        labels = pod["metadata"]["labels"]
        found[labels.get(CURRENT, labels[ROLE])].add(pod["metadata"]["name"])
    return found


def role_counts(cluster: Cluster, name: str) -> dict[str, tuple[int, str]]:
    return {role["name"]: (role["replicas"], role["ready"]) for role in cluster.status(name)["roles"]}


def settled_roles(cluster: Cluster, name: str) -> tuple[dict[str, set[str]], dict[str, tuple[int, str]]] | None:
    """Returns ready pods by role and the counts in the status once these agree and the service is ready, else None."""
    pods, counts = pods_by_role(cluster, name), role_counts(cluster, name)
    agree = counts == {role: (len(found), f"{len(found)}/{len(found)}") for role, found in pods.items()}
    return (pods, counts) if agree and cluster.ready(name).get("status") == "True" else None


def counted(cluster: Cluster, name: str) -> tuple[int, int]:
    """Returns the pods that the service's one budget counts, and how many of them may be evicted."""
    (budget,) = cluster.children(name, "poddisruptionbudgets")
    return budget["status"]["expectedPods"], budget["status"]["disruptionsAllowed"]


def answering(cluster: Cluster, name: str) -> set[str]:
    """Returns the pods that the Service of the engines reaches."""
    slices = cluster.get("endpointslices", f"kubernetes.io/service-name={name}-engines")
    return {endpoint["targetRef"]["name"] for found in slices for endpoint in found.get("endpoints") or ()}


def serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60):
            return True
    except OSError:
        return False


def test_engine_switches_and_stays_so_when_another_operator_takes_over(
    plane_with_pods: ControlPlane, gateway: StubGateway, tmp_path: Path
) -> None:
    plane = plane_with_pods
    gateway.services["default/fluid"] = {"running_requests": 1}
    with OperatorProcess(plane, tmp_path, f"--gateways={gateway.address}") as operator:
        cluster = Cluster(plane, operator.url)
        roles = {"prefill": {"replicas": 1, "scaling": PAIR}, "decode": {"replicas": 2, "scaling": PAIR}}
        cluster.apply("fluid", unified=None, **roles)
        wait(lambda: cluster.ready("fluid").get("status") == "True")
        before = pods_by_role(cluster, "fluid")
        busy = min(before["decode"])
        gateway.services["default/fluid"] = {
            "running_requests": 1,
            "queued_tokens": 500_000,
            "engines": {f"default/{busy}": {"role": "decode", "running": 9}},
        }
        (idle,) = before["decode"] - {busy}
        wait(lambda: idle in pods_by_role(cluster, "fluid")["prefill"])
        gateway.services["default/fluid"] = {"running_requests": 1}
        settled = wait(lambda: settled_roles(cluster, "fluid"))
        cluster.look_again("fluid")
        assert (pods_by_role(cluster, "fluid"), role_counts(cluster, "fluid")) == settled
    with OperatorProcess(plane, tmp_path, f"--gateways={gateway.address}") as operator:
        cluster = Cluster(plane, operator.url)
        wait(lambda: serves(operator.url))
        wait(lambda: cluster.reconciles() > 0)
        cluster.look_again("fluid")
        assert (pods_by_role(cluster, "fluid"), role_counts(cluster, "fluid")) == settled
        counts = {name: len(pods) for name, pods in settled[0].items()}
        assert {name: ready for name, (_, ready) in settled[1].items()} == {r: f"{n}/{n}" for r, n in counts.items()}
        (kept,) = (pod for pod in cluster.children("fluid", "pods") if pod["metadata"]["name"] == idle)
        assert kept["metadata"]["labels"][ROLE] == "decode", "its Deployment's selector still finds it"
        names = {pod["metadata"]["name"] for pod in cluster.children("fluid", "pods")}
        wait(lambda: answering(cluster, "fluid") == names)
        pods = len(names)
        wait(lambda: counted(cluster, "fluid") == (pods, 1))  # two budgets would let both prefill engines go
        assert plane.kubectl("delete", "infsvc", "fluid").returncode == 0
