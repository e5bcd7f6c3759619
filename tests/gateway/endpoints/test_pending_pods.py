"""The reason why a pod is not ready, in Kubernetes' words, as a table."""

from typing import Any

import pytest

from mini_infer_gateway.endpoints.pods import LONGEST_REASON, seen_pod
from mini_infer_gateway.endpoints.services import seen_service
from tests.gateway.endpoints.test_kubernetes_watch import pod


def pending_pod(**status: Any) -> dict[str, Any]:
    found = pod("p")
    found["status"] = {"phase": "Pending", **status}
    return found


def waiting(reason: str, message: str = "") -> list[dict[str, Any]]:
    return [{"name": "engine", "ready": False, "state": {"waiting": {"reason": reason, "message": message}}}]


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have enough nvidia.com/gpu"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"containerStatuses": waiting("ImagePullBackOff", "no such image")}, "ImagePullBackOff: no such image"),
        ({"containerStatuses": waiting("ContainerCreating")}, "ContainerCreating"),
        ({"initContainerStatuses": waiting("CrashLoopBackOff", "back-off 10s")}, "CrashLoopBackOff: back-off 10s"),
        ({"conditions": [UNSCHEDULABLE]}, "0/3 nodes have enough nvidia.com/gpu"),
        (
            {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "False", "message": "containers with unready status"}],
            },
            "containers with unready status",
        ),
        (
            {"containerStatuses": [{"ready": False, "state": {"terminated": {"reason": "OOMKilled"}}}]},
            "OOMKilled",
        ),
        ({}, "Pending"),
    ],
)
def test_a_pod_that_is_not_ready_has_a_reason_when_it_is_seen(status: dict[str, Any], reason: str) -> None:
    seen = seen_pod(pending_pod(**status))
    assert seen is not None
    assert seen.pending is not None
    assert (seen.pending.name, seen.pending.service, seen.pending.reason) == ("ns/p", "ns/svc", reason)


def test_a_pod_has_no_reason_when_it_is_ready_or_ends() -> None:
    ready = seen_pod(pod("p"))
    assert ready is not None
    assert (ready.listed is not None, ready.pending) == (True, None)
    assert seen_pod(pending_pod() | {"metadata": pod("p", deletionTimestamp="now")["metadata"]}) is None


def test_a_long_reason_is_cut_when_it_is_kept() -> None:
    seen = seen_pod(pending_pod(containerStatuses=waiting("ErrImagePull", "x" * 10_000)))
    assert seen is not None
    assert seen.pending is not None
    assert len(seen.pending.reason) == LONGEST_REASON


@pytest.mark.parametrize(
    ("status", "reasons"),
    [
        ({"conditions": [{"type": "Ready", "status": "True", "reason": "AllReplicasReady"}]}, ["AllReplicasReady"]),
        ({"conditions": "of another form"}, []),
        ({}, []),
        (None, []),
    ],
)
def test_a_service_is_routed_to_when_its_status_cannot_be_read(status: Any, reasons: list[str]) -> None:
    seen = seen_service({"metadata": {"name": "a", "namespace": "ns"}, "spec": {"model": {}}, "status": status})
    assert (seen.service.name, seen.service.model) == ("ns/a", "a")
    assert [condition.reason for condition in seen.status.conditions] == reasons
