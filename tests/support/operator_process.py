"""The operator as a process on a control plane, with its own rights, and the cluster as a user sees it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml

from mini_infer_operator.local.ports import free_ports
from mini_infer_operator.permissions import LEASE_RULES, RULES
from tests.support.control_plane import ControlPlane
from tests.support.services import changed

ROOT = Path(__file__).parents[2]
CHILDREN = "deployments,services,controllerrevisions,poddisruptionbudgets"
LABEL = "serving.mini-infer.io/service"


class Cluster:
    """The control plane with an operator that runs, as a user sees it."""

    def __init__(self, plane: ControlPlane, operator_url: str = "") -> None:
        self.plane = plane
        self.operator_url = operator_url
        """Of the operator's health port."""

    def get(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        result = self.plane.kubectl("get", kinds, f"--selector={selector}", "--show-managed-fields", "-o", "json")
        assert result.returncode == 0, result.stderr
        return list(json.loads(result.stdout)["items"])

    def children(self, name: str, kinds: str = CHILDREN) -> list[dict[str, Any]]:
        return self.get(kinds, f"{LABEL}={name}")

    def status(self, name: str) -> dict[str, Any]:
        (service,) = [s for s in self.get("infsvc") if s["metadata"]["name"] == name]
        return dict(service.get("status", {}))

    def ready(self, name: str) -> dict[str, Any]:
        conditions = self.status(name).get("conditions", [])
        return next((dict(c) for c in conditions if c["type"] == "Ready"), {})

    def evict(self, pod: str) -> subprocess.CompletedProcess[str]:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "default"}}
        path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
        return self.plane.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))

    def apply(self, name: str, **spec: Any) -> None:
        quick = {"rollout": {"minReadySeconds": 1}}
        self.plane.apply(changed({"metadata": {"name": name}, "spec": {**quick, **spec}}))


def wait(what: Callable[[], Any], limit_s: float = 20.0) -> Any:
    """The first truthy answer of `what`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if answer := what():
            return answer
        time.sleep(0.15)
    raise AssertionError(f"not within {limit_s} s: {what()!r}")


def operator_kubeconfig(plane: ControlPlane, path: Path) -> Path:
    """For a service account that has the rights in permissions.py and no others."""
    return kubeconfig_with(plane, path, "operator", [*RULES, *LEASE_RULES])


def kubeconfig_with(plane: ControlPlane, path: Path, name: str, rules: list[dict[str, Any]]) -> Path:
    """For a new service account of this name that has these rights and no others."""
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": "default"}
    reference = {"apiGroup": rbac, "kind": "ClusterRole", "name": name}
    metadata = {"name": name}
    plane.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**metadata, "namespace": "default"}},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [subject],
        },
    )
    token = plane.kubectl("create", "token", name).stdout.strip()
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path.write_text(yaml.safe_dump(config))
    return path


class OperatorProcess:
    """One operator; on leaving it must have run without a traceback, unless it was killed."""

    def __init__(self, plane: ControlPlane, folder: Path, *flags: str) -> None:
        (port,) = free_ports(1)
        self.log, self.url = folder / "log", f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mini_infer_operator.controller.run", "--engine-image=engine:1", *flags]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "KUBECONFIG": str(operator_kubeconfig(plane, folder / "kubeconfig")),
            "MINI_INFER_HEALTH_PORT": str(port),
        }
        self.killed = False
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=ROOT)

    def kill(self) -> None:
        """As a lost node does."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        ended = self.process.poll()
        if ended is None:
            self.process.terminate()
            self.process.wait(15)
        text = self.log.read_text()
        if kind is None:
            assert ended is None or self.killed, text[-3000:]
            assert "Traceback" not in text, text[-3000:]
