"""What is said of pods as a kubelet, the scheduler and the node controller write them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from mini_infer_operator.objects.failures import LONGEST_QUOTE, MAX_REPORTED, copy_failures, failures_of

LABELS = {"serving.mini-infer.io/role": "unified", "serving.mini-infer.io/revision": "r1"}
TEMPLATE = {"containers": [{"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}]}


def deployment(message: str | None = None, **template: Any) -> dict[str, Any]:
    conditions = [{"type": "ReplicaFailure", "status": "True", "message": message}] if message else []
    return {
        "metadata": {"name": "demo-unified-r1", "labels": LABELS},
        "spec": {"template": {"spec": {**TEMPLATE, **template}}},
        "status": {"conditions": conditions},
    }


def pod(status: dict[str, Any], name: str = "p", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": LABELS} | metadata, "spec": {"nodeName": "n1"}, "status": status}


def container(state: str = "running", *, ready: bool = False, **more: Any) -> dict[str, Any]:
    return {"name": "engine", "ready": ready, "started": ready, "state": {state: more.pop("detail", {})}, **more}


def waiting(reason: str, message: str = "m", **more: Any) -> dict[str, Any]:
    return {"phase": "Pending", "containerStatuses": [container("waiting", **_detail(reason, message), **more)]}


def _detail(reason: str, message: str) -> dict[str, Any]:
    return {"detail": {"reason": reason, "message": message}}


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def running(*containers: dict[str, Any], ready: str = "False", **conditions: str) -> dict[str, Any]:
    others = [{"type": kind.replace("__", "/"), "status": value} for kind, value in conditions.items()]
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": ready}, *others],
        "containerStatuses": list(containers),
    }


TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: model '/no': there is no such folder\n\n"


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (waiting("ErrImagePull", "not found"), "ImagePullFailed", "p: ErrImagePull: not found"),
        (waiting("ErrImageNeverPull"), "ImagePullFailed", "p: ErrImageNeverPull: m"),
        (
            waiting("CreateContainerConfigError", 'secret "hub" not found'),
            "ContainerStartFailed",
            'p: CreateContainerConfigError: secret "hub" not found',
        ),
        (waiting("RunContainerError", "no such file"), "ContainerStartFailed", "p: RunContainerError: no such file"),
        (
            waiting("CrashLoopBackOff", "back-off 40s", restartCount=4, lastState=ended(2, TRACEBACK)),
            "EngineCrashing",
            "p: the engine ended 4 times, last with exit code 2: ValueError: model '/no': there is no such folder",
        ),
        (
            waiting("CrashLoopBackOff", "back-off 40s", restartCount=4, lastState=ended(1)),
            "EngineCrashing",
            "p: the engine ended 4 times, last with exit code 1; kubectl logs --previous shows why",
        ),
        (
            running(container("terminated", detail=ended(3, "no GPU")["terminated"])),
            "EngineCrashing",
            "p: the engine ended with exit code 3: no GPU",
        ),
        (
            running(container(restartCount=1, lastState=ended(3, "no GPU"))),
            "EngineCrashing",
            "p: the engine ended with exit code 3: no GPU",
        ),
        (
            waiting("CrashLoopBackOff", restartCount=2, lastState=ended(137, reason="OOMKilled")),
            "OutOfMemory",
            "p: the container ended 2 times, last killed for memory (OOMKilled): raise resources.limits.memory "
            "(now 2Gi)",
        ),
        (
            {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}]},
            "Unschedulable",
            "p: 0/1 nodes",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "PodFailed", "p: Evicted: disk"),
        (running(container(ready=True)), "NodeLost", "p: node n1 does not report: kubectl describe node n1"),
        (
            running(container(ready=True), example__gate="False"),
            "EngineNotReady",
            "p: its engine is ready, but its readiness gate example/gate is not",
        ),
        (
            running({**container(), "started": True}),
            "EngineNotReady",
            "p: it runs, and its readiness probe says that it cannot answer: was it drained by hand, or is it hung? "
            "kubectl logs shows it; deleting the pod starts another",
        ),
    ],
)
def test_failure_reason_and_message_of_a_pods_status(status: dict[str, Any], reason: str, words: str) -> None:
    (failure,) = failures_of([deployment()], [pod(status)])
    assert (failure.reason, failure.message) == (reason, words)
    assert failures_of([deployment()], [pod(status, deletionTimestamp="now")]) == []
    drained = {**LABELS, "serving.mini-infer.io/draining": "true"}
    assert failures_of([deployment()], [pod(status, labels=drained)]) == []  # by us: it goes when it has finished


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Pending"},
        waiting("ContainerCreating"),
        waiting("PodInitializing"),
        running(container()),  # loading: not started yet
        running(container(ready=True), ready="True"),
        running(container(ready=True, restartCount=3, lastState=ended(1)), ready="True"),  # it has recovered
    ],
)
def test_no_failure_is_reported_when_a_pod_starts_or_runs(status: dict[str, Any]) -> None:
    assert failures_of([deployment()], [pod(status)]) == []


def test_pods_refused_is_reported_when_quota_forbids_pods() -> None:
    (failure,) = failures_of([deployment("pods is forbidden: exceeded quota: q")], [])
    assert failure.reason == "PodsRefused"
    assert failure.message == "demo-unified-r1: pods is forbidden: exceeded quota: q"


def test_unschedulable_names_the_scheduler_when_no_scheduler_answers() -> None:
    (failure,) = failures_of([deployment(schedulerName="mine")], [pod({"phase": "Pending"})])
    assert failure.reason == "Unschedulable"
    assert "schedulerName mine" in failure.message


def test_a_failure_is_reported_when_an_init_container_fails() -> None:
    status = {"phase": "Pending", "initContainerStatuses": [{**container("waiting", **_detail("ErrImagePull", "x"))}]}
    (failure,) = failures_of([deployment()], [pod(status)])
    assert failure.reason == "ImagePullFailed"


def test_equal_failures_are_reported_once_and_the_most_specific_first() -> None:
    unscheduled = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no GPU"}]}
    pods = [pod(unscheduled, f"p{n}") for n in range(5)] + [pod(waiting("ErrImagePull"), "q")]
    first, second = failures_of([deployment()], pods)
    assert first.message == "q: ErrImagePull: m"
    assert second.message == "p0, p1 and 3 more: no GPU"
    many = [pod(waiting("ErrImagePull", f"image {n}"), f"p{n}") for n in range(9)]
    assert len(failures_of([deployment()], many)) == MAX_REPORTED


def test_a_failure_message_is_truncated_when_it_is_long() -> None:
    (failure,) = failures_of([deployment("x" * 5000)], [])
    assert len(failure.message) <= LONGEST_QUOTE + 30
    assert failure.message.endswith("...")


def copying(phase: str, code: int | None = None, message: str = "", **metadata: str) -> dict[str, Any]:
    state = {"running": {}} if code is None else ended(code, message)
    return pod({"phase": phase, "containerStatuses": [{"name": "fetch", "ready": False, "state": state}]}, **metadata)


@pytest.mark.parametrize(
    ("pods", "age_s", "expected"),
    [
        ([], 5, None),
        ([], 15, "m: it has no pod: kubectl describe job m says why"),
        ([copying("Running")], 900, None),
        ([waiting("ErrImagePull", "not found")], 5, "p: ErrImagePull: not found"),
        ([pod(waiting("ContainerCreating")), copying("Running")], 5, None),
        (
            [copying("Failed", 1, "x\nmini-infer fetch: no such bucket\n")],
            60,
            "p: the fetch ended with exit code 1: mini-infer fetch: no such bucket; its Job tries again",
        ),
        ([copying("Failed", 1, name="a", creationTimestamp="1"), copying("Running", creationTimestamp="2")], 60, None),
        (
            [pod({"phase": "Failed", "reason": "Evicted", "message": "disk"})],
            60,
            "p: Evicted: disk; its Job tries again",
        ),
    ],
)
def test_a_copy_says_why_it_does_not_go_on(pods: list[dict[str, Any]], age_s: int, expected: str | None) -> None:
    job = {"metadata": {"name": "m", "creationTimestamp": "2026-01-01T12:00:00Z"}}
    now = datetime(2026, 1, 1, 12, age_s // 60, age_s % 60, tzinfo=UTC)
    pods = [item if "metadata" in item else pod(item) for item in pods]
    messages = [failure.message for failure in copy_failures(job, pods, now)]
    assert messages == ([expected] if expected is not None else [])
