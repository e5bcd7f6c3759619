"""Templates that ask for more than the operator allows, on a real API server, and an upgrade below running engines."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.operator_process import LABEL, Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
HOST_PATH = {"spec": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}}
OPEN = ("--pod-security=privileged",)


def replicas(cluster: Cluster, name: str) -> list[int]:
    return [deployment["status"].get("readyReplicas", 0) for deployment in cluster.children(name, "deployments")]


def test_nothing_is_made_when_a_new_service_asks_for_more(cluster: Cluster, tmp_path: Path) -> None:
    with OperatorProcess(cluster.plane, tmp_path):
        cluster.apply("asks", unified={"template": HOST_PATH})
        ready = wait(lambda: cluster.ready("asks"))
        assert ready["reason"] == "PodSecurity"
        assert "spec.unified.template.spec.volumes[host].hostPath" in ready["message"]
        assert "--pod-security=privileged" in ready["message"]
        assert cluster.children("asks") == []
        cluster.plane.kubectl("delete", "infsvc", "asks")


def test_engines_go_on_when_an_upgraded_operator_no_longer_allows_their_template(
    cluster: Cluster, tmp_path: Path
) -> None:
    def change(engines: int, **spec: Any) -> None:
        cluster.apply("older", unified={"replicas": engines, "template": HOST_PATH, **spec})

    for folder in (before := tmp_path / "before", after := tmp_path / "after"):
        folder.mkdir()
    with OperatorProcess(cluster.plane, before, *OPEN):
        change(1)
        wait(lambda: cluster.ready("older").get("status") == "True")
    with OperatorProcess(cluster.plane, after):
        change(2)  # of a revision whose template is stored
        wait(lambda: replicas(cluster, "older") == [2] and cluster.ready("older").get("status") == "True")
        pods = {pod["metadata"]["uid"] for pod in cluster.get("pods", f"{LABEL}=older")}
        change(2, engine={"maxModelLen": 512})
        refused = wait(lambda: (r := cluster.ready("older")).get("reason") == "PodSecurity" and r)
        assert "hostPath" in refused["message"]
        available = [c for c in cluster.status("older")["conditions"] if c["type"] == "Available"]
        assert available[0]["status"] == "True"
        assert {pod["metadata"]["uid"] for pod in cluster.get("pods", f"{LABEL}=older")} == pods
        cluster.apply("older", unified={"replicas": 2, "template": None})
        wait(lambda: cluster.ready("older").get("status") == "True")
        assert replicas(cluster, "older") == [2]
