"""The planner in a cluster: a gateway's reports change the number of engines, and nothing else does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mini_infer_contract.rollouts import ROLLOUTS_PATH
from mini_infer_contract.scaling import SCALING_PATH
from tests.operator.test_scale import ready_engines
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
SCALING = {"minReplicas": 0, "maxReplicas": 3, "windows": {"downSeconds": 2, "zeroSeconds": 2}}


class StubGateway:
    """Reports the load that a test sets, by service, and the figures of canaries."""

    def __init__(self) -> None:
        self.services: dict[str, dict[str, Any]] = {}
        self.rollouts: dict[str, dict[str, Any]] = {}
        """Figures by service and revision."""
        self.reads = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.reads += 1
                found = {SCALING_PATH: stub.services, ROLLOUTS_PATH: stub.rollouts}
                body = json.dumps({"started_s": 1.0, "services": found.get(self.path, {})}).encode()
                self.send_response(200 if self.path in found else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Logs nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()
    yield stub
    stub.close()


@pytest.fixture(scope="module")
def cluster(
    plane_with_pods: ControlPlane, gateway: StubGateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with OperatorProcess(
        plane_with_pods, tmp_path_factory.mktemp("operator"), f"--gateways={gateway.address}"
    ) as operator:
        yield Cluster(plane_with_pods, operator.url)


def role(cluster: Cluster, name: str) -> dict[str, Any]:
    return dict(cluster.status(name)["roles"][0])


def test_service_stops_and_starts_by_what_gateways_report(cluster: Cluster, gateway: StubGateway) -> None:
    cluster.apply("sleeper", unified={"replicas": 1, "scaling": SCALING})
    wait(lambda: cluster.status("sleeper").get("roles"))
    wait(lambda: role(cluster, "sleeper").get("wanted") == 0)
    wait(lambda: cluster.status("sleeper").get("replicas") == 0)
    gateway.services["default/sleeper"] = {"queued_requests": 2}
    wait(lambda: ready_engines(cluster, "sleeper") == 1)
    assert role(cluster, "sleeper")["scaledBy"] == "Planner"

    def messages() -> list[str]:
        events = cluster.plane.kubectl("get", "events", "-o", "json", "--field-selector=reason=Planned").stdout
        return [item["message"] for item in json.loads(events)["items"]]

    wait(lambda: any(message.startswith("unified goes from 0 to 1: ") for message in messages()))
    gateway.services["default/sleeper"] = {"queued_requests": 2, "queued_tokens": 50_000_000}
    wait(lambda: ready_engines(cluster, "sleeper") == 3)
    gateway.services.clear()
    wait(lambda: cluster.status("sleeper").get("replicas") == 0)


def test_scale_subresource_has_no_effect_when_the_planner_owns_the_number(
    cluster: Cluster, gateway: StubGateway
) -> None:
    gateway.services["default/owned"] = {"running_requests": 1}
    cluster.apply("owned", unified={"replicas": 1, "scaling": SCALING})
    wait(lambda: ready_engines(cluster, "owned") == 1)
    assert cluster.plane.kubectl("scale", "infsvc/owned", "--replicas=3").returncode == 0
    scaler = {"apiVersion": "serving.mini-infer.io/v1alpha1", "kind": "InferenceScaler"}
    spec = {"service": "owned", "role": "unified", "replicas": 2}
    cluster.plane.apply({**scaler, "spec": spec, "metadata": {"name": "owned-unified", "namespace": "default"}})
    cluster.look_again("owned")
    assert (role(cluster, "owned")["wanted"], cluster.status("owned")["replicas"]) == (1, 1)

    def message() -> str:
        read = cluster.plane.kubectl("get", "infscaler/owned-unified", "-o", "json")
        return str(json.loads(read.stdout).get("status", {}).get("message", ""))

    wait(lambda: "the planner sets the number" in message())


@pytest.mark.timeout(600)
def test_two_autoscalers_change_nothing_when_the_planner_owns_the_number(
    cluster: Cluster, gateway: StubGateway
) -> None:
    """One on the service and one on an InferenceScaler, whose lower bounds are above the planner's number."""
    gateway.services["default/fought"] = {"running_requests": 1}
    cluster.apply("fought", unified={"replicas": 1, "scaling": SCALING})
    version = "serving.mini-infer.io/v1alpha1"
    scaler = {"apiVersion": version, "kind": "InferenceScaler", "spec": {"service": "fought", "role": "unified"}}
    cluster.plane.apply({**scaler, "metadata": {"name": "fought-unified", "namespace": "default"}})
    wait(lambda: ready_engines(cluster, "fought") == 1)
    targets = {"fought": "InferenceService", "fought-unified": "InferenceScaler"}
    for name, kind in targets.items():
        average = {"type": "AverageValue", "averageValue": "1"}
        metric = {"type": "Pods", "pods": {"metric": {"name": "none"}, "target": average}}
        target = {"apiVersion": version, "kind": kind, "name": name}
        spec = {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3, "metrics": [metric]}
        hpa = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": spec}
        cluster.plane.apply({**hpa, "metadata": {"name": name, "namespace": "default"}})

    def written() -> int:
        read = cluster.plane.kubectl("get", "infsvc/fought", "-o", "json")
        return int(json.loads(read.stdout)["spec"]["unified"]["replicas"])

    wait(lambda: written() == 2, limit_s=120)
    cluster.look_again("fought")
    assert role(cluster, "fought")["wanted"] == 1
    assert cluster.status("fought")["replicas"] == 1
    for name in targets:
        cluster.plane.kubectl("delete", "hpa", name)


def test_scale_subresource_sets_the_number_when_an_autoscaler_owns_it(cluster: Cluster, gateway: StubGateway) -> None:
    gateway.services["default/handed"] = {"queued_requests": 9, "queued_tokens": 50_000_000}
    cluster.apply("handed", unified={"replicas": 1, "scaling": {**SCALING, "owner": "Autoscaler"}})
    wait(lambda: ready_engines(cluster, "handed") == 1)
    assert cluster.plane.kubectl("scale", "infsvc/handed", "--replicas=2").returncode == 0
    wait(lambda: ready_engines(cluster, "handed") == 2)
    assert role(cluster, "handed")["scaledBy"] == "Autoscaler"
    assert "wanted" not in role(cluster, "handed")


def test_no_writes_are_made_when_a_scaled_service_is_at_rest(cluster: Cluster, gateway: StubGateway) -> None:
    gateway.services["default/steady"] = {"running_requests": 1}
    cluster.apply("steady", unified={"replicas": 1, "scaling": {**SCALING, "minReplicas": 1}})
    wait(lambda: cluster.ready("steady").get("status") == "True")
    cluster.look_again("steady")

    def version() -> str:
        (found,) = [item for item in cluster.get("infsvc") if item["metadata"]["name"] == "steady"]
        return str(found["metadata"]["resourceVersion"])

    def stays_for_three_reads() -> bool:
        before, reads = version(), gateway.reads
        wait(lambda: gateway.reads >= reads + 3)
        return version() == before

    wait(stays_for_three_reads)  # at last: what the operator still had to report of the start comes first
