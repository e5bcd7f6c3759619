"""An operator that meets the first version's CRD: it says so, works on, and brings the CRD up when it is told to."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer_operator.permissions import CRD_RULES
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import ROOT, Cluster, OperatorProcess, kubeconfig_with, operator_kubeconfig, wait
from tests.support.services import changed

pytestmark = [pytest.mark.cluster]
FIRST = Path(__file__).parent / "data" / "first-crd.yaml"
CRD = "crd/inferenceservices.serving.mini-infer.io"


@pytest.fixture
def cluster(plane_with_pods: ControlPlane, tmp_path: Path) -> Iterator[Cluster]:
    """An operator that was started on the first version's CRD."""
    assert plane_with_pods.kubectl("delete", "infsvc", "--all", "--all-namespaces").returncode == 0
    apply_crd(plane_with_pods, FIRST)
    try:
        with OperatorProcess(plane_with_pods, tmp_path) as operator:
            yield Cluster(plane_with_pods, operator.url)
    finally:
        apply_crd(plane_with_pods, ROOT / "crds")


def apply_crd(plane: ControlPlane, path: Path) -> None:
    """Also where another manager owns its fields."""
    done = plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    assert done.returncode == 0, done.stderr


def send_request(cluster: Cluster, path: str) -> tuple[int, dict[str, Any]]:
    """Status and content of one of the operator's health paths."""
    try:
        with urllib.request.urlopen(cluster.operator_url + path, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, {}


def test_an_old_crd_is_reported_and_served_until_it_is_upgraded(cluster: Cluster, tmp_path: Path) -> None:
    def reported() -> Any:
        status, answer = send_request(cluster, "/readyz")
        return status == 503 and any("CRD is older" in problem for problem in answer["problems"]) and answer

    (problem,) = wait(lambda: len((a := reported() or {}).get("problems", ())) == 1 and a)["problems"]
    assert "kubectl apply --server-side --force-conflicts -f crds/" in problem
    assert send_request(cluster, "/healthz")[0] == 200  # a restart would not help

    cluster.plane.apply(changed({"metadata": {"name": "early"}}))
    wait(lambda: cluster.ready("early").get("status") == "True")
    cluster.plane.apply(changed({"metadata": {"name": "broken"}, "spec": {"image": "engine:broken"}}))
    wait(lambda: cluster.ready("broken").get("reason") == "ImagePullFailed")
    assert not any(c["type"] == "Reconciling" for c in cluster.status("broken")["conditions"])

    kubeconfig = kubeconfig_with(cluster.plane, tmp_path / "hook", "crd-upgrade", CRD_RULES)  # the chart's hook
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KUBECONFIG": str(kubeconfig)}
    command = [sys.executable, "-m", "mini_infer_operator.controller.run", "--apply-crd"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    wait(lambda: send_request(cluster, "/readyz")[0] == 200)
    cluster.apply("broken", image="engine:broken", unified={"replicas": 1})
    wait(lambda: any(c["type"] == "Reconciling" for c in cluster.status("broken")["conditions"]))
    assert cluster.ready("early")["status"] == "True"


def test_the_missing_right_is_reported_when_the_crd_cannot_be_applied(cluster: Cluster, tmp_path: Path) -> None:
    kubeconfig = operator_kubeconfig(cluster.plane, tmp_path / "other")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KUBECONFIG": str(kubeconfig)}
    command = [sys.executable, "-m", "mini_infer_operator.controller.run", "--apply-crd"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert "cannot patch resource" in done.stderr


def test_services_are_served_when_the_crd_is_installed_after_the_operator_has_started(
    plane_with_pods: ControlPlane, tmp_path: Path
) -> None:
    assert plane_with_pods.kubectl("delete", "infsvc", "--all", "--all-namespaces").returncode == 0
    assert plane_with_pods.kubectl("delete", "crd", CRD.removeprefix("crd/")).returncode == 0
    try:
        with OperatorProcess(plane_with_pods, tmp_path) as operator:
            cluster = Cluster(plane_with_pods, operator.url)
            wait(
                lambda: any(
                    "the CRD is not installed" in p for p in send_request(cluster, "/readyz")[1].get("problems", ())
                )
            )
            apply_crd(plane_with_pods, ROOT / "crds")
            wait(lambda: send_request(cluster, "/readyz")[0] == 200)
            cluster.apply("late")
            wait(lambda: cluster.ready("late").get("status") == "True")
            plane_with_pods.kubectl("delete", "infsvc", "late")
    finally:
        apply_crd(plane_with_pods, ROOT / "crds")
