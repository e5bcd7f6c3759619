from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mini_infer_operator.objects import observed_workloads as module
from mini_infer_operator.observe import ObservedWorkload

LABELS = {
    "serving.mini-infer.io/service": "demo",
    "serving.mini-infer.io/role": "unified",
    "serving.mini-infer.io/revision": "r1",
}


def at(minute: int) -> datetime:
    return datetime(2026, 1, 1, 0, minute, tzinfo=UTC)


def observed_workloads(workloads: Sequence[Any], pods: Sequence[Any], now: int = 30) -> list[ObservedWorkload]:
    return module.observed_workloads(workloads, pods, min_ready=timedelta(minutes=2), now=at(now))


def text(minute: int) -> str:
    return at(minute).strftime("%Y-%m-%dT%H:%M:%SZ")


def deployment(replicas: int, ready: int = 0, available: int = 0, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "d", "labels": {}, "creationTimestamp": text(0), "lastApplied": text(1)},
        "spec": {"replicas": replicas, "selector": {"matchLabels": LABELS}},
        "status": {"readyReplicas": ready, "availableReplicas": available, **status},
    }


def pod(*, ready: bool, since: int, scheduled: int = 2, why: str = "") -> dict[str, Any]:
    conditions = [
        {"type": "PodScheduled", "status": str(not why), "reason": why, "lastTransitionTime": text(scheduled)},
        {"type": "Ready", "status": str(ready), "lastTransitionTime": text(since)},
    ]
    return {
        "metadata": {"name": "p", "labels": LABELS, "creationTimestamp": text(2)},
        "status": {"conditions": conditions},
    }


def test_role_and_revision_are_read_from_the_selector() -> None:
    (seen,) = observed_workloads([deployment(1)], [])
    assert (seen.role, seen.revision) == ("unified", "r1")


@pytest.mark.parametrize(
    "metadata",
    [
        {"annotations": {module.ANNOTATION_DRAINING_SINCE: "yesterday"}, "labels": {module.LABEL_DRAINING: "true"}},
        {"annotations": {module.ANNOTATION_DRAINING_SINCE: "2026-01-01"}, "labels": {module.LABEL_DRAINING: "true"}},
        {"labels": {module.LABEL_WORKER_INDEX: "x"}},
        {"labels": {module.LABEL_WORKER_INDEX: "-1"}},
        {"labels": {module.LABEL_GROUP_INDEX: "\u0661"}},
        {"labels": {module.LABEL_GROUP_INDEX: ""}},
    ],
)
def test_engines_are_observed_when_a_user_has_written_nonsense_on_a_pod(metadata: dict[str, Any]) -> None:
    strange = pod(ready=True, since=3)
    strange["metadata"] |= metadata | {"labels": LABELS | metadata["labels"]}
    (seen,) = observed_workloads([deployment(2, ready=2)], [strange, pod(ready=True, since=3)])
    assert len(seen.engines) == 2
    for engine in seen.engines:
        assert engine.draining_since is None or engine.draining_since.tzinfo is not None


def test_an_engine_is_not_available_when_it_just_became_ready() -> None:
    (seen,) = observed_workloads([deployment(2, ready=2, available=1)], [pod(ready=True, since=3)] * 2)
    assert (seen.ready, seen.available, seen.unready_since, seen.progressed_at) == (2, 1, None, at(3))


def test_unready_since_is_the_last_change_of_any_unready_engine() -> None:
    pods = [pod(ready=False, since=5), pod(ready=False, since=9)]
    (seen,) = observed_workloads([deployment(2)], pods)
    assert seen.unready_since == at(9)
    assert seen.progressed_at == at(1)


def test_unready_since_is_the_last_progress_when_pods_are_missing() -> None:
    (seen,) = observed_workloads([deployment(2)], [])
    assert (seen.unready_since, seen.worked) == (at(1), False)


@pytest.mark.parametrize(
    ("status", "pods", "worked"),
    [
        ({}, [pod(ready=False, since=2)], False),
        ({}, [pod(ready=False, since=8)], True),
        ({}, [pod(ready=True, since=2)], True),
        ({"conditions": [{"type": "Progressing", "reason": "NewReplicaSetAvailable"}]}, [], True),
        ({"conditions": [{"type": "Progressing", "reason": "ReplicaSetUpdated"}]}, [], False),
    ],
)
def test_a_revision_has_worked_by_its_status_and_pods(
    status: dict[str, Any], pods: list[dict[str, Any]], worked: bool
) -> None:
    (seen,) = observed_workloads([deployment(1, **status)], pods)
    assert seen.worked is worked


def test_unschedulable_since_is_read_from_the_pods_condition() -> None:
    (seen,) = observed_workloads([deployment(1)], [pod(ready=False, since=2, scheduled=4, why="Unschedulable")])
    assert seen.unschedulable_since == at(4)


def test_unschedulable_since_is_none_when_another_pod_is_terminating() -> None:
    ending = pod(ready=False, since=9)
    ending["metadata"]["deletionTimestamp"] = text(3)
    waiting = pod(ready=False, since=2, scheduled=4, why="Unschedulable")
    (seen,) = observed_workloads([deployment(1)], [ending, waiting])
    assert seen.unschedulable_since is None


def test_terminating_pods_and_deployments_are_not_counted() -> None:
    going = deployment(2)
    going["metadata"]["deletionTimestamp"] = text(3)
    ending = pod(ready=False, since=9)
    ending["metadata"]["deletionTimestamp"] = text(3)
    assert observed_workloads([going], []) == []
    (seen,) = observed_workloads([deployment(1, ready=1, available=1)], [ending, pod(ready=True, since=3)])
    assert seen.unready_since is None


def group_set(replicas: int) -> dict[str, Any]:
    template = {"metadata": {"labels": LABELS}}
    group = {"size": 2, "leaderTemplate": template, "workerTemplate": template}
    return {
        "metadata": {"name": "l", "labels": {}, "creationTimestamp": text(0), "lastApplied": text(1)},
        "spec": {"replicas": replicas, "leaderWorkerTemplate": group},
        "status": {"readyReplicas": replicas},
    }


def member(group: int, worker: int, *, ready: bool, since: int = 3) -> dict[str, Any]:
    found = pod(ready=ready, since=since)
    labels = {
        **LABELS,
        "leaderworkerset.sigs.k8s.io/group-index": str(group),
        "leaderworkerset.sigs.k8s.io/worker-index": str(worker),
    }
    return {**found, "metadata": {**found["metadata"], "name": f"l-{group}-{worker}", "labels": labels}}


def test_a_group_counts_by_its_leader() -> None:
    pods = [member(g, w, ready=g == 1 or w == 1) for g in (0, 1) for w in (0, 1)]
    (seen,) = observed_workloads([group_set(2)], pods)
    assert (seen.role, seen.revision, seen.replicas, seen.ready, seen.available) == ("unified", "r1", 2, 1, 1)
    assert seen.available_by_index == (False, True)
    assert [(e.name, e.index, e.ready) for e in seen.engines] == [("l-0-0", 0, False), ("l-1-0", 1, True)]


def test_a_group_is_available_when_its_leader_was_ready_for_min_ready_seconds() -> None:
    pods = [member(0, 0, ready=True, since=29), member(1, 0, ready=True, since=10)]
    (seen,) = observed_workloads([group_set(2)], pods)
    assert (seen.ready, seen.available_by_index, seen.available_at) == (2, (False, True), at(31))


def test_a_worker_is_unschedulable_when_no_node_has_room() -> None:
    waiting = member(0, 1, ready=False)
    waiting["status"]["conditions"][0] |= {"reason": "Unschedulable", "status": "False"}
    (seen,) = observed_workloads([group_set(1)], [member(0, 0, ready=False), waiting])
    assert seen.unschedulable_since == at(2)
