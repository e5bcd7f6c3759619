"""Explains why engines are not ready, from workloads and pods: a reason and a sentence each. Pure; sends no request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mini_infer_operator.objects.observed_workloads import pods_of
from mini_infer_operator.observe import Failure
from mini_infer_operator.resource import LABEL_DRAINING, LABEL_REVISION, LABEL_ROLE, Reason

Object = Mapping[str, Any]

MAX_REPORTED = 3
LONGEST_QUOTE = 600
"""Characters of one quotation: a traceback's last line and a scheduler's sentence fit."""

_IMAGE_WAITS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
_HARMLESS_WAITS = {"ContainerCreating", "PodInitializing"}
_BY_SIGNIFICANCE = (
    Reason.PODS_REFUSED,
    Reason.IMAGE_PULL_FAILED,
    Reason.CONTAINER_START_FAILED,
    Reason.OUT_OF_MEMORY,
    Reason.ENGINE_CRASHING,
    Reason.UNSCHEDULABLE,
    Reason.POD_FAILED,
    Reason.NODE_LOST,
    Reason.ENGINE_NOT_READY,
)
_OOM = "OOMKilled"
_JOB_WITHOUT_PODS_S = 10.0
"""Age at which a Job should have a pod."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """A fault of one object; pods with the same fault are reported together."""

    reason: str
    words: str


def failures_of(workloads: Iterable[Object], pods: Iterable[Object]) -> list[Failure]:
    """Returns MAX_REPORTED failures at most, the most specific first; pods with the same fault share one sentence."""
    by_fault: dict[_Fault, list[str]] = {}
    templates: dict[tuple[str, str], Object] = {}
    for workload in workloads:
        templates[_revision(workload)] = pods_of(workload)["template"].get("spec", {})
        if (fault := deployment_fault(workload)) is not None:
            by_fault.setdefault(fault, []).append(workload["metadata"]["name"])
    for pod in pods:
        if (fault := pod_fault(pod, templates.get(_revision(pod), {}))) is not None:
            by_fault.setdefault(fault, []).append(pod["metadata"]["name"])
    order = sorted(by_fault, key=lambda fault: (_BY_SIGNIFICANCE.index(fault.reason), fault.words))
    return [Failure(f.reason, f"{_subject(sorted(by_fault[f]))}: {f.words}") for f in order[:MAX_REPORTED]]


def copy_failures(job: Object, pods: Iterable[Object], now: datetime) -> list[Failure]:
    """Returns why a Job's copy of a model does not go on: the fault of its last pod, or what that ended with while the
    Job waits before it tries again, or that it has no pod. It is empty while a pod copies.
    """
    found = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    if not found:
        name, made = job["metadata"]["name"], job["metadata"].get("creationTimestamp")
        if made is None or (now - datetime.fromisoformat(made)).total_seconds() < _JOB_WITHOUT_PODS_S:
            return []
        return [Failure(Reason.PODS_REFUSED, f"{name}: it has no pod: kubectl describe job {name} says why")]
    last = found[-1]
    if last.get("status", {}).get("phase") != "Failed":
        return failures_of((), [last])
    fault = _container_fault(last["status"], {}) or pod_fault(last, {})
    if fault is None:
        return []
    return [Failure(Reason.POD_FAILED, f"{last['metadata']['name']}: {fault.words}; its Job tries again")]


def deployment_fault(deployment: Object) -> _Fault | None:
    """Returns why no pods can be created, as the API server answered the ReplicaSet controller, or None."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return _Fault(Reason.PODS_REFUSED, _quote(condition.get("message", "")) or "its pods cannot be made")
    return None


def pod_fault(pod: Object, template: Object) -> _Fault | None:
    """Returns a pod's fault, or None while it starts normally, is ready, or is being removed.

    `template` is the pod spec of its Deployment, since the pod's own is cached in part only.
    """
    if "deletionTimestamp" in pod["metadata"] or LABEL_DRAINING in pod["metadata"].get("labels", {}):
        return None
    status = pod.get("status", {})
    if status.get("phase") == "Failed":
        words = f"{status.get('reason', 'Failed')}: {status.get('message', '')}"
        return _Fault(Reason.POD_FAILED, _quote(words))
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    return (
        _scheduling_fault(status, conditions, template)
        or _container_fault(status, template)
        or _readiness_fault(pod, status, conditions)
    )


def _scheduling_fault(status: Object, conditions: Mapping[str, Object], template: Object) -> _Fault | None:
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return _Fault(Reason.UNSCHEDULABLE, _quote(scheduled.get("message", "")) or "no node takes it")
    scheduler = template.get("schedulerName", "default-scheduler")
    if not conditions and status.get("phase") == "Pending" and scheduler != "default-scheduler":
        return _Fault(Reason.UNSCHEDULABLE, f"schedulerName {scheduler} has not looked at it: does that scheduler run?")
    return None


def _container_fault(status: Object, template: Object) -> _Fault | None:
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        state = container.get("state", {})
        waiting = state.get("waiting", {}).get("reason", "")
        last = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
        if waiting in _IMAGE_WAITS:
            words = f"{waiting}: {state['waiting'].get('message', '')}"
            return _Fault(Reason.IMAGE_PULL_FAILED, _quote(words))
        if waiting and waiting != "CrashLoopBackOff" and waiting not in _HARMLESS_WAITS:
            return _Fault(Reason.CONTAINER_START_FAILED, _quote(f"{waiting}: {state['waiting'].get('message', '')}"))
        failed = last and (last.get("exitCode") != 0 or waiting == "CrashLoopBackOff")
        if failed and not container.get("ready"):
            return _ended(container, last, template)
    return None


def _ended(container: Object, last: Object, template: Object) -> _Fault:
    times = int(container.get("restartCount", 0)) + (1 if container.get("state", {}).get("terminated") else 0)
    how_often = f"ended {times} times, last" if times > 1 else "ended"
    if last.get("reason") == _OOM:
        limits = [
            c.get("resources", {}).get("limits", {}).get("memory")
            for c in template.get("containers", ())
            if c.get("name") == container.get("name")
        ]
        limit = f" (now {limits[0]})" if limits and limits[0] else ""
        words = f"the container {how_often} killed for memory (OOMKilled): raise resources.limits.memory{limit}"
        return _Fault(Reason.OUT_OF_MEMORY, words)
    line = _last_line(last.get("message", ""))
    quoted = f": {line}" if line else "; kubectl logs --previous shows why"
    return _Fault(
        Reason.ENGINE_CRASHING, f"the {container['name']} {how_often} with exit code {last.get('exitCode')}{quoted}"
    )


def _readiness_fault(pod: Object, status: Object, conditions: Mapping[str, Object]) -> _Fault | None:
    ready = conditions.get("Ready", {})
    if ready.get("status") != "False" or status.get("phase") != "Running":
        return None
    containers = status.get("containerStatuses", ())
    if containers and all(container.get("ready") for container in containers):
        waiting = [c["type"] for c in conditions.values() if "/" in c["type"] and c["status"] != "True"]
        if waiting:
            return _Fault(Reason.ENGINE_NOT_READY, f"its engine is ready, but its readiness gate {waiting[0]} is not")
        node = pod.get("spec", {}).get("nodeName", "its node")
        return _Fault(Reason.NODE_LOST, f"node {node} does not report: kubectl describe node {node}")
    if any(container.get("started") and not container.get("ready") for container in containers):
        words = (
            "it runs, and its readiness probe says that it cannot answer: was it drained by hand, or is it hung? "
            "kubectl logs shows it; deleting the pod starts another"
        )
        return _Fault(Reason.ENGINE_NOT_READY, words)
    return None


def _revision(item: Object) -> tuple[str, str]:
    labels = item["metadata"].get("labels", {})
    return labels.get(LABEL_ROLE, ""), labels.get(LABEL_REVISION, "")


def _subject(names: list[str]) -> str:
    """Joins names: `a`, `a and b`, or `a, b and 5 more`."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _quote(lines[-1]) if lines else ""


def _quote(text: str) -> str:
    words = " ".join(text.split()).removesuffix(":")
    return words if len(words) <= LONGEST_QUOTE else words[: LONGEST_QUOTE - 3] + "..."
