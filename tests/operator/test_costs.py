"""What the operator costs the API server and its node, read from the audit log and /proc.

Guards for CI with a few services. MINI_INFER_COST_SERVICES=500 measures a large cluster: 15 requests a service, 20 s of
CPU, 140 MB.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer_operator.objects.kinds import path_of
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import Cluster, OperatorProcess, wait
from tests.support.services import changed

OPERATOR = "system:serviceaccount:default:operator"
SERVICES = int(os.environ.get("MINI_INFER_COST_SERVICES", "15"))
REST_S = float(os.environ.get("MINI_INFER_COST_REST_S", "8"))
LIMIT_S = 60.0 + 2 * SERVICES
"""The API server and its controllers take most of it: on two cores half a second for each service."""
EVERY_S = SERVICES / 100
"""Between two looks at all services."""
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600 + LIMIT_S + 2 * REST_S)]
READS = {"get", "list", "watch"}


class Measured:
    """An operator under measurement."""

    def __init__(self, cluster: Cluster, operator: OperatorProcess) -> None:
        self.cluster = cluster
        self.operator = operator
        self._since = 0

    def mark(self) -> None:
        """Count requests from now on."""
        log = self.cluster.plane.audit_log
        self._since = log.stat().st_size if log.exists() else 0

    def requests(self) -> Counter[tuple[str, str]]:
        """Verb and resource of what was asked since the mark; the Lease of the operator's pods is not counted."""
        counts = self.cluster.plane.requests_of(OPERATOR, self._since)
        return Counter((r["verb"], r.get("resource", "")) for r in counts if r.get("resource") != "leases")

    def wait_until_quiet(self) -> None:
        """Events are posted one after the other, beside the work: a slow API server gets the last ones late."""

        def quiet() -> bool:
            before = self.requests().total()
            time.sleep(3)
            return self.requests().total() == before

        wait(quiet, limit_s=30 + SERVICES)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.operator.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.operator.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.fixture(scope="module")
def measured(plane_with_pods: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    cluster = Cluster(plane_with_pods)
    plane_with_pods.add_node("roomy", cpu=SERVICES, memory=f"{SERVICES}Gi", pods=2 * SERVICES)
    with OperatorProcess(plane_with_pods, tmp_path_factory.mktemp("operator")) as operator:
        wait(lambda: "works" in operator.log.read_text())
        yield Measured(cluster, operator)
    plane_with_pods.kubectl("delete", "--raw", path_of("InferenceService", "default"))  # all in one request
    plane_with_pods.kubectl("delete", "node", "roomy", "--wait=false")


def service(name: str, **unified: Any) -> dict[str, Any]:
    return changed({"metadata": {"name": name}, "spec": {"unified": {"replicas": 1, **unified}}})


def apply(cluster: Cluster, *services: dict[str, Any]) -> None:
    """In pieces: kubectl has a minute for each."""
    for begin in range(0, len(services), 50):
        cluster.plane.apply(*services[begin : begin + 50])


def ready_count(cluster: Cluster, prefix: str) -> int:
    services = [s for s in cluster.get("infsvc") if s["metadata"]["name"].startswith(prefix)]
    conditions = [c for s in services for c in s.get("status", {}).get("conditions", ())]
    return sum(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def test_services_cost_few_requests_and_none_when_they_are_ready(measured: Measured) -> None:
    cluster = measured.cluster
    measured.mark()
    cpu_s = measured.cpu_s()
    apply(cluster, *(service(f"cost-{number:03}") for number in range(SERVICES)))
    wait(lambda: ready_count(cluster, "cost-") == SERVICES, LIMIT_S, EVERY_S)
    time.sleep(2)
    counts, cpu_s = measured.requests(), measured.cpu_s() - cpu_s
    print(
        f"{SERVICES} services: {counts.total() / SERVICES:.1f} requests and {1000 * cpu_s / SERVICES:.0f} ms CPU each, "
        f"{measured.peak_mb():.0f} MB",
        dict(counts),
    )
    assert counts.total() <= 15 * SERVICES, counts
    assert cpu_s <= max(1.6, 0.04 * SERVICES)
    assert measured.peak_mb() <= 120 + 0.04 * SERVICES

    time.sleep(12)  # the new engines become available, which is no news
    measured.wait_until_quiet()
    measured.mark()
    cpu_s = measured.cpu_s()
    time.sleep(REST_S)
    counts = measured.requests()
    print(f"{REST_S:.0f} s at rest: {dict(counts)}, {measured.cpu_s() - cpu_s:.2f} s CPU")
    writes = {key: count for key, count in counts.items() if key[0] not in READS}
    assert writes == {}
    assert sum(counts.values()) <= max(2, 5 * REST_S / 60)


def test_unschedulable_services_cost_nothing_and_delay_no_others(measured: Measured) -> None:
    cluster = measured.cluster
    nowhere = {"spec": {"nodeSelector": {"there-is": "none"}}}
    apply(cluster, *(service(f"wait-{number:03}", template=nowhere) for number in range(SERVICES)))

    def all_wait() -> bool:
        services = [s for s in cluster.get("infsvc") if s["metadata"]["name"].startswith("wait-")]
        reported = [c for s in services for c in s.get("status", {}).get("conditions", ()) if c["type"] == "Ready"]
        return [condition["reason"] for condition in reported] == ["Unschedulable"] * SERVICES

    wait(all_wait, LIMIT_S, EVERY_S)
    time.sleep(8)  # past the look at whether the cluster is full
    measured.wait_until_quiet()
    measured.mark()
    time.sleep(REST_S)
    counts = measured.requests()
    print(f"{SERVICES} services that wait: {dict(counts)} in {REST_S:.0f} s")
    assert counts.total() <= max(2, 2 * SERVICES * REST_S / 60)

    begun = time.monotonic()
    cluster.plane.apply(service("eager"))
    wait(lambda: cluster.ready("eager").get("status") == "True")
    took_s = time.monotonic() - begun
    print(f"one more service beside them is ready after {took_s:.1f} s")
    assert took_s <= 3 + 1.5  # the test's own kubectl takes its share on a busy machine
