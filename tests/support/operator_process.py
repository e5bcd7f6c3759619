"""The operator as a process on a control plane, with its own rights, and the cluster as a user sees it."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml
from prometheus_client.parser import text_string_to_metric_families

from mini_infer_contract import metrics as names
from mini_infer_operator.crd import custom_resource_definition
from mini_infer_operator.local.ports import free_ports
from mini_infer_operator.objects.kinds import KINDS, path_of
from mini_infer_operator.permissions import LEASE_RULES, PEER_ROOT_RULES, RULES
from mini_infer_operator.resource.not_yet import NOT_YET
from tests.support.control_plane import ControlPlane
from tests.support.services import changed

ROOT = Path(__file__).parents[2]
CHILDREN = "deployments,services,controllerrevisions,poddisruptionbudgets"
LABEL = "serving.mini-infer.io/service"
OPERATOR = "system:serviceaccount:default:operator"
"""The name of the operator in the audit log."""


_OTHERS = {
    "infsvc": path_of("InferenceService", "default"),
    "hpa": "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers",
    "replicasets": "/apis/apps/v1/namespaces/default/replicasets",
    "leases": "/apis/coordination.k8s.io/v1/namespaces/default/leases",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
}


def _path(name: str) -> str:
    """Of a list, by the kind's plural, as the operator's table has it."""
    paths = {row.plural: path_of(row.name, "default") for row in KINDS}
    return (paths | {"infscaler": paths["inferencescalers"]} | _OTHERS)[name]


class Cluster:
    """The control plane with an operator that runs, as a user sees it."""

    def __init__(self, plane: ControlPlane, operator_url: str = "") -> None:
        self.plane = plane
        self.operator_url = operator_url
        """Of the operator's health port."""

    def get(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects of the namespace default; several kinds are separated by commas."""
        found = []
        for name in kinds.split(","):
            answer = self.plane.read(_path(name), labelSelector=selector)
            about = {"apiVersion": answer["apiVersion"], "kind": answer["kind"].removesuffix("List")}
            found += [{**about, **item} for item in answer["items"]]
        return found

    def children(self, name: str, kinds: str = CHILDREN) -> list[dict[str, Any]]:
        return self.get(kinds, f"{LABEL}={name}")

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.plane.read(f"{_path('infsvc')}/{name}").get("status", {}))

    def ready(self, name: str) -> dict[str, Any]:
        """Returns the Ready condition, or {} while it speaks of the spec before the last edit."""
        service = self.plane.read(f"{_path('infsvc')}/{name}")
        status = service.get("status", {})
        if status.get("observedGeneration") != service["metadata"]["generation"]:
            return {}
        return next((dict(c) for c in status.get("conditions", ()) if c["type"] == "Ready"), {})

    def samples(self) -> dict[str, float]:
        """Returns the operator's metrics by name, summed over their labels."""
        with urllib.request.urlopen(f"{self.operator_url}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def reconciles(self) -> float:
        """Returns the number of reconciles that have ended, of all services."""
        return self.samples().get(names.OPERATOR_RECONCILES, 0.0)

    def wait_for_reconcile(self, since: float) -> None:
        """Waits for one more than `since`, and until no service is due: what the operator would do, it has done."""

        def is_done() -> bool:
            samples = self.samples()
            return samples[names.OPERATOR_RECONCILES] > since and samples[names.OPERATOR_QUEUE_DEPTH] == 0

        wait(is_done)

    def look_again(self, name: str) -> None:
        """Has the operator reconcile a service that nobody has changed, and waits for it."""
        since = self.reconciles()
        done = self.plane.kubectl("annotate", "infsvc", name, "--overwrite", f"look-again={time.time_ns()}")
        assert done.returncode == 0, done.stderr
        self.wait_for_reconcile(since)

    def evict(self, pod: str) -> subprocess.CompletedProcess[str]:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "default"}}
        path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
        return self.plane.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))

    @contextmanager
    def without_room(self) -> Iterator[None]:
        """No node takes a new pod: what is evicted meanwhile is not replaced, however long the test takes."""
        nodes = [node["metadata"]["name"] for node in self.plane.read("/api/v1/nodes")["items"]]
        try:
            cordoned = self.plane.kubectl("cordon", *nodes)
            assert cordoned.returncode == 0, cordoned.stderr
            yield
        finally:
            self.plane.kubectl("uncordon", *nodes)

    def clear(self) -> None:
        """Deletes all services, and waits until Kubernetes has collected what belonged to them."""
        self.plane.kubectl("delete", "infsvc", "--all")
        wait(lambda: not self.get(CHILDREN, LABEL))

    def patched_pods(self, since: int) -> set[str]:
        """Returns the names of pods that the operator has patched since this size of the audit log."""
        found = self.plane.requests_of(OPERATOR, since)
        return {one["name"] for one in found if (one["verb"], one.get("resource")) == ("patch", "pods")}

    def apply(self, name: str, **spec: Any) -> None:
        quick = {"rollout": {"minReadySeconds": 1}}
        self.plane.apply(changed({"metadata": {"name": name}, "spec": {**quick, **spec}}))


def wait(what: Callable[[], Any], limit_s: float = 120.0, every_s: float = 0.0) -> Any:
    """Returns the first truthy answer of `what`. Without `every_s` it asks less often the longer it takes: answers take
    the processor from what is waited for. The limit only ends a test that hangs.
    """
    begun_s = time.monotonic()
    while (waited_s := time.monotonic() - begun_s) < limit_s:
        if answer := what():
            return answer
        time.sleep(every_s or min(0.4, max(0.15, waited_s / 20)))
    raise AssertionError(f"not within {limit_s} s: {what()!r}")


def operator_kubeconfig(plane: ControlPlane, path: Path) -> Path:
    """For a service account that has the rights in permissions.py, and no others, in any installation of the tests."""
    create, get = PEER_ROOT_RULES
    roots = [create, *(get | {"resourceNames": [f"{name}-peer-root"]} for name in ("mini-infer", "a", "b", "c"))]
    return kubeconfig_with(plane, path, "operator", [*RULES, *LEASE_RULES, *roots])


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


EVERYTHING_WORKS = """
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.resource.not_yet import NOT_YET
from mini_infer_operator.controller.run import main
InferenceService.rules = tuple(rule for rule in InferenceService.rules if rule not in NOT_YET)
main()
"""


def crd_without_refusals() -> dict[str, Any]:
    """Takes what engines cannot do yet."""
    crd = custom_resource_definition()
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    refusals = {rule.message for rule in NOT_YET}
    root["x-kubernetes-validations"] = [r for r in root["x-kubernetes-validations"] if r["message"] not in refusals]
    return crd


class OperatorProcess:
    """One operator; on leaving it must have run without a traceback, unless it was killed."""

    def __init__(
        self, plane: ControlPlane, folder: Path, *flags: str, refuses: bool = True, server: str | None = None
    ) -> None:
        """`refuses`: services that ask for what engines cannot do yet. `server`: a proxy before the API server."""
        (port,) = free_ports(1)
        self.log, self.url = folder / "log", f"http://127.0.0.1:{port}"
        run = ["-m", "mini_infer_operator.controller.run"] if refuses else ["-c", EVERYTHING_WORKS]
        command = [sys.executable, *run, "--engine-image=engine:1", *flags]
        kubeconfig = operator_kubeconfig(plane, folder / "kubeconfig")
        if server is not None:
            config = yaml.safe_load(kubeconfig.read_text())
            config["clusters"][0]["cluster"] = {"server": server}
            kubeconfig.write_text(yaml.safe_dump(config))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "KUBECONFIG": str(kubeconfig),
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
            self.process.wait(60)
        text = self.log.read_text()
        if kind is None:
            assert ended is None or self.killed, text[-3000:]
            assert "Traceback" not in text, text[-3000:]
