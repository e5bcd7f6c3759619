"""Operators of one class share a Lease, so one of them works; those of different classes divide the services."""

import contextlib
import urllib.request
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


def leads(process: OperatorProcess) -> bool:
    return "holds the lease" in process.log.read_text()


def lease(cluster: Cluster) -> dict[str, Any]:
    (found,) = [item for item in cluster.get("leases") if item["metadata"]["name"] == "mini-infer-operator"]
    spec: dict[str, Any] = found["spec"]
    return spec


def is_synced(process: OperatorProcess) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{process.url}/readyz", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def test_nothing_is_deleted_when_two_installations_of_a_class_have_different_images(
    cluster: Cluster, tmp_path: Path
) -> None:
    with operator(cluster, tmp_path / "a", "--identity=default/a") as first:
        for name in NAMES:
            cluster.apply(name)
        wait(lambda: all_ready(cluster, "engine:1"))
        before = uids(cluster)
        with operator(cluster, tmp_path / "b", "--identity=default/b", "--engine-image=engine:2") as second:
            wait(lambda: is_synced(second))
            cluster.apply("shared-0", unified={"replicas": 3})
            wait(lambda: cluster.status("shared-0").get("readyReplicas") == 3)
            assert not leads(second)
            assert uids(cluster) == before
        first.kill()  # gone for good, without a word: another one takes over, at once where the Lease is gone, too
        assert cluster.plane.kubectl("delete", "lease", "mini-infer-operator", "--namespace=default").returncode == 0
        with operator(cluster, tmp_path / "c", "--identity=default/c"):
            cluster.apply("shared-0", unified={"replicas": 1})
            wait(lambda: cluster.status("shared-0").get("replicas") == 1)
            assert uids(cluster) == before


def test_a_waiting_pod_takes_over_when_the_working_one_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path / "a") as first:
        cluster.apply("shared-0")
        wait(lambda: cluster.ready("shared-0").get("status") == "True")
        with operator(cluster, tmp_path / "b") as second:
            wait(lambda: is_synced(second))
            assert not leads(second)
            before = lease(cluster)
            first.kill()
            cluster.apply("shared-1")
            wait(lambda: cluster.ready("shared-1").get("status") == "True")
            after = lease(cluster)
            assert before["leaseDurationSeconds"] <= 15  # the time after which the waiting pod may take over
            assert after["leaseTransitions"] == before["leaseTransitions"] + 1
            assert after["holderIdentity"] != before["holderIdentity"]


def test_the_lease_is_given_back_when_a_pod_ends(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path / "a"):
        cluster.apply("shared-0")
        wait(lambda: cluster.ready("shared-0").get("status") == "True")
    assert lease(cluster).get("holderIdentity", "") == ""


def test_each_operator_looks_after_its_class_when_there_are_several(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path / "blue", "--operator-class=blue", "--engine-image=engine:2") as blue:
        cluster.apply("shared-0", operatorClass="blue")
        cluster.apply("shared-1")
        wait(lambda: cluster.ready("shared-0").get("status") == "True")
        assert cluster.children("shared-1", CHILDREN) == []
        with operator(cluster, tmp_path / "default") as default:
            wait(lambda: cluster.ready("shared-1").get("status") == "True")
            assert leads(blue)
            assert leads(default)
            cluster.apply("shared-0", operatorClass=None)  # handed over
            wait(
                lambda: (
                    {
                        d["spec"]["template"]["spec"]["containers"][0]["image"]
                        for d in cluster.children("shared-0", "deployments")
                    }
                    == {"engine:1"}
                )
            )
    names = {item["metadata"]["name"] for item in cluster.get("leases")}
    assert {"mini-infer-operator", "mini-infer-operator-blue"} <= names
