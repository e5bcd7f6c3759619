"""Two operators never both write: pods of one installation share a Lease, installations claim services."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.operator_process import CHILDREN, Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
NAMES = [f"shared-{number}" for number in range(5)]


def operator(cluster: Cluster, folder: Path, *flags: str) -> OperatorProcess:
    folder.mkdir()
    return OperatorProcess(cluster.plane, folder, *flags)


def all_ready(cluster: Cluster, image: str) -> bool:
    services = {s["metadata"]["name"]: s.get("status", {}) for s in cluster.get("infsvc")}
    deployments = [d for name in NAMES for d in cluster.children(name, "deployments")]
    images = {d["spec"]["template"]["spec"]["containers"][0]["image"] for d in deployments}
    ready = [c["status"] for n in NAMES for c in services.get(n, {}).get("conditions", ()) if c["type"] == "Ready"]
    return ready == ["True"] * len(NAMES) and images == {image} and len(deployments) == len(NAMES)


def uids(cluster: Cluster) -> dict[str, str]:
    return {f"{c['kind']}/{c['metadata']['name']}": c["metadata"]["uid"] for n in NAMES for c in cluster.children(n)}


def versions(cluster: Cluster) -> dict[str, Any]:
    services = {s["metadata"]["name"]: s.get("status", {}) for s in cluster.get("infsvc")}
    return {name: services[name].get("operator") for name in NAMES}


def test_two_installations_with_different_images_delete_nothing(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path / "a", "--identity=default/a") as first:
        for name in NAMES:
            cluster.apply(name)
        wait(lambda: all_ready(cluster, "engine:1"))
        before = uids(cluster)
        with operator(cluster, tmp_path / "b", "--identity=default/b", "--engine-image=engine:2"):
            deadline = time.monotonic() + 20  # longer than it waits for an answer
            while time.monotonic() < deadline:
                assert uids(cluster) == before
                time.sleep(1)
            assert versions(cluster) == dict.fromkeys(NAMES, "default/a")
            events = cluster.plane.kubectl("get", "events", "--field-selector=reason=OtherOperator", "-o=name")
            assert events.stdout
        first.kill()  # gone for good, without a word: another one takes over
        with operator(cluster, tmp_path / "c", "--identity=default/c"):
            wait(lambda: set(versions(cluster).values()) == {"default/c"})
            cluster.apply("shared-0", unified={"replicas": 1})
            wait(lambda: cluster.status("shared-0").get("replicas") == 1)
            assert uids(cluster) == before


def test_a_waiting_pod_takes_over_when_the_working_one_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path / "a") as first:
        cluster.apply("shared-0")
        wait(lambda: cluster.ready("shared-0").get("status") == "True")
        with operator(cluster, tmp_path / "b") as second:
            wait(lambda: cluster.plane.kubectl("get", "lease", "mini-infer-operator").returncode == 0)
            time.sleep(3)
            assert "holds the lease" not in second.log.read_text()
            first.kill()
            lost = time.monotonic()
            cluster.apply("shared-1")
            wait(lambda: cluster.ready("shared-1").get("status") == "True")
            assert time.monotonic() - lost <= 30


def test_a_pod_that_ends_gives_the_lease_back(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path / "a"):
        cluster.apply("shared-0")
        wait(lambda: cluster.ready("shared-0").get("status") == "True")
    (lease,) = [item for item in cluster.get("leases") if item["metadata"]["name"] == "mini-infer-operator"]
    assert lease["spec"].get("holderIdentity", "") == ""


def test_an_operator_looks_after_its_class_only(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path / "a", "--operator-class=blue"):
        cluster.apply("shared-0", operatorClass="blue")
        cluster.apply("shared-1")
        wait(lambda: cluster.ready("shared-0").get("status") == "True")
        assert cluster.children("shared-1", CHILDREN) == []
