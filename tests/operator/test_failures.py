"""The table of failures on a real API server: each is told in `kubectl get`, by reason and in Kubernetes' words."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.control_plane import ControlPlane
from tests.support.operator_process import Cluster, OperatorProcess, wait
from tests.support.services import changed

pytestmark = [pytest.mark.cluster]
ROWS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("failures.yaml").read_text())
CLUSTER_WIDE = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "MutatingWebhookConfiguration"}
ADMITTED_WITHIN_S = 60.0
"""How long the API server may take until a policy or webhook that it stored is in force."""
REPORTED_WITHIN_LOOKS = 100
"""Ten seconds are promised, and all rows run at once. A look takes a third of a second, and as much longer on a busy
machine as the operator does."""


@pytest.fixture(scope="module")
def cluster(plane_with_pods: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With an operator that leaves it to the API server which rights and Secrets pods may have."""
    flags = ("--pod-security=privileged", "--allow-secrets=*", "--allow-service-accounts=*")
    with OperatorProcess(plane_with_pods, tmp_path_factory.mktemp("operator"), *flags) as operator:
        yield Cluster(plane_with_pods, operator.url)


class Row:
    """One failure, in a namespace of its own."""

    def __init__(self, cluster: Cluster, row: dict[str, Any]) -> None:
        self.plane: ControlPlane = cluster.plane
        self.row = row
        self.namespace = f"failure-{row['name']}"

    def objects(self) -> list[dict[str, Any]]:
        """What the failure needs."""
        objects = json.loads(json.dumps(self.row.get("objects", [])).replace("NAMESPACE", self.namespace))
        for item in objects:
            where = {} if item["kind"] in CLUSTER_WIDE else {"namespace": self.namespace}
            item["metadata"] = {"name": self.namespace, **item.get("metadata", {}), **where}
        return list(objects)

    def namespace_object(self) -> dict[str, Any]:
        """Its namespace."""
        metadata = {"name": self.namespace, "labels": self.row.get("namespace", {})}
        return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}

    def refuses_deployments(self) -> bool:
        """Whether the API server's admission refuses one here, which it begins to do some time after it was told."""
        template = {"metadata": {"labels": {"app": "probe"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        probe = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "probe", "namespace": self.namespace},
            "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "probe"}}, "template": template},
        }
        return self.plane.kubectl("create", "--dry-run=server", "-f=-", stdin=json.dumps(probe)).returncode != 0

    def service(self) -> dict[str, Any]:
        """The service that meets the failure."""
        return changed({"metadata": {"name": "bad", "namespace": self.namespace}, "spec": self.row.get("spec", {})})

    def go_on(self) -> None:
        """Carry out the steps."""
        for step in self.row.get("steps", ()):
            pods = wait(lambda: len(found := self.pods()) >= 2 and found)
            chosen = pods if "pods" in step else pods[:1]
            for name in chosen:
                if "delete" in step:
                    self.kubectl("delete", "pod", name, "--grace-period=0", "--force")
                else:
                    status = {"status": step.get("pods") or step["one"]}
                    self.kubectl(
                        "patch", "pod", name, "--subresource=status", "--type=merge", f"-p={json.dumps(status)}"
                    )
            self.changed_pod = chosen[0]
            if "until" in step:
                wait(lambda reason=step["until"]: self.ready().get("reason") == reason)

    def pods(self) -> list[str]:
        """Names, sorted."""
        return sorted(item["metadata"]["name"] for item in json.loads(self.kubectl("get", "pods", "-o=json"))["items"])

    def ready(self) -> dict[str, Any]:
        """The Ready condition."""
        service = json.loads(self.kubectl("get", "infsvc", "bad", "-o=json"))
        conditions = service.get("status", {}).get("conditions", ())
        return next((dict(c) for c in conditions if c["type"] == "Ready"), {})

    def kubectl(self, *arguments: str) -> str:
        """What it printed; it must not fail."""
        done = self.plane.kubectl(f"--namespace={self.namespace}", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def rows(cluster: Cluster) -> Iterator[dict[str, Row]]:
    """All failures, begun at once."""
    made = {row["name"]: Row(cluster, row) for row in ROWS}
    plane = cluster.plane
    namespaces = [row.namespace for row in made.values()]
    try:
        plane.apply(*(row.namespace_object() for row in made.values()))
        plane.apply(*(item for row in made.values() for item in row.objects()))
        for row in made.values():
            if any(item["kind"] in CLUSTER_WIDE for item in row.objects()):
                wait(row.refuses_deployments, ADMITTED_WITHIN_S)
        plane.apply(*(row.service() for row in made.values()))
        yield made
    finally:
        for item in (item for row in made.values() for item in row.objects() if item["kind"] in CLUSTER_WIDE):
            plane.kubectl("delete", item["kind"], item["metadata"]["name"], "--wait=false")
        plane.kubectl("delete", "namespace", "--wait=false", *namespaces)


def test_the_table_has_twenty_failures() -> None:
    assert len(ROWS) >= 20
    assert len({row["name"] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", [row["name"] for row in ROWS])
def test_each_failure_is_reported_in_status(rows: dict[str, Row], name: str) -> None:
    row = rows[name]
    row.go_on()
    message = row.row["message"].replace("POD", getattr(row, "changed_pod", ""))

    def reported() -> bool:
        ready = row.ready()
        return ready.get("reason") == row.row["reason"] and message in ready["message"]

    looks = 1
    while not reported():
        assert looks < REPORTED_WITHIN_LOOKS, f"wanted {row.row['reason']}: {message!r}, told {row.ready()}"
        looks += 1
        time.sleep(0.2)
    assert row.ready()["status"] == "False"
