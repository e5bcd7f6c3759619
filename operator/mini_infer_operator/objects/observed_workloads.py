"""Converts Deployments, LeaderWorkerSets and pods to the counts and times that planning reads. Pure.

A group's leader shows the state of the whole group: it is ready when all its pods work.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from mini_infer_operator.launch import DEFAULT_GRACE_S
from mini_infer_operator.objects.ownership import revision_key
from mini_infer_operator.observe import ObservedEngine, ObservedWorkload
from mini_infer_operator.resource import (
    ANNOTATION_DRAINING_SINCE,
    LABEL_DRAINING,
    LABEL_GROUP_INDEX,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_WORKER_INDEX,
)

Object = Mapping[str, Any]

AFTER_SCHEDULING = timedelta(seconds=5)
"""Delay after scheduling from which a change of a pod's readiness shows that the pod was ready before: kubelet writes
the first value at once, and a container that never gets ready does not change it.
"""


def observed_workloads(
    workloads: Iterable[Object],
    pods: Iterable[Object],
    running: Mapping[str, int] | None = None,
    *,
    min_ready: timedelta,
    now: datetime,
) -> list[ObservedWorkload]:
    """Returns one item for each Deployment and LeaderWorkerSet that is not being deleted.

    `running` is the number of running requests that draining pods reported, by name. `min_ready` applies to
    LeaderWorkerSets, which have no minReadySeconds of their own.
    """
    pods_by_key: dict[tuple[str, str], list[Object]] = defaultdict(list)
    leaving = False
    for pod in pods:
        leaving |= "deletionTimestamp" in pod["metadata"]
        labels = pod["metadata"].get("labels", {})
        if "deletionTimestamp" not in pod["metadata"]:
            pods_by_key[str(labels.get(LABEL_ROLE, "")), str(labels.get(LABEL_REVISION, ""))].append(pod)
    seen = []
    for workload in workloads:
        if "deletionTimestamp" not in workload["metadata"]:
            mine = pods_by_key[revision_key(workload)]
            groups = is_of_groups(workload)
            counts = _observed_groups(workload, mine, min_ready, now) if groups else _observed(workload, mine)
            leaders = [pod for pod in mine if worker_index(pod) == 0]
            seen.append(replace(counts, engines=[_engine(pod, running or {}, groups=groups) for pod in leaders]))
    # what an engine that is ending frees may be all that a new one waits for
    return [replace(workload, unschedulable_since=None) for workload in seen] if leaving else seen


def is_of_groups(workload: Object) -> bool:
    """Returns True if the workload is a LeaderWorkerSet."""
    return "leaderWorkerTemplate" in workload["spec"]


def pods_of(workload: Object) -> dict[str, Any]:
    """Returns the workload's pod templates in the format of `pod.frozen_pods`."""
    if not is_of_groups(workload):
        return {"template": workload["spec"].get("template", {})}
    group = workload["spec"]["leaderWorkerTemplate"]
    worker = group["workerTemplate"]
    return {"template": group.get("leaderTemplate", worker), "workerTemplate": worker, "size": group.get("size", 1)}


def worker_index(pod: Object) -> int:
    """Returns the pod's index in its group; 0 for a leader, and for a pod that is not in a group."""
    return _index(pod, LABEL_WORKER_INDEX)


def _observed(deployment: Object, pods: Sequence[Object]) -> ObservedWorkload:
    status = deployment.get("status", {})
    replicas = deployment["spec"].get("replicas", 1)
    ready = min(replicas, status.get("readyReplicas", 0))
    available = min(ready, status.get("availableReplicas", 0))
    return _with_times(deployment, pods, replicas, ready, available, complete=_was_complete(status))


def _observed_groups(workload: Object, pods: Sequence[Object], min_ready: timedelta, now: datetime) -> ObservedWorkload:
    replicas = workload["spec"].get("replicas", 1)
    leaders = {_group_index(pod): pod for pod in pods if worker_index(pod) == 0}
    ready_since = [
        _since(leaders[i], "Ready") if i in leaders and is_ready(leaders[i]) else None for i in range(replicas)
    ]
    available = tuple(since is not None and since + min_ready <= now for since in ready_since)
    waits = [since + min_ready for since in ready_since if since is not None and since + min_ready > now]
    ready = sum(since is not None for since in ready_since)
    seen = _with_times(workload, pods, replicas, ready, sum(available), complete=False)
    return replace(seen, available_by_index=available, available_at=min(waits, default=None))


def _with_times(
    workload: Object, pods: Sequence[Object], replicas: int, ready: int, available: int, *, complete: bool
) -> ObservedWorkload:
    role, revision = revision_key(workload)
    metadata = workload["metadata"]
    created, last_step = time_of(metadata.get("creationTimestamp")), time_of(metadata.get("lastApplied"))
    unready_since = [_since(pod, "Ready") for pod in pods if not is_ready(pod)]
    leaders = [pod for pod in pods if worker_index(pod) == 0]
    ready_since = [_since(pod, "Ready") for pod in leaders if is_ready(pod)]
    if ready < replicas and len(leaders) < replicas:  # some are not even made yet
        unready_since += [last_step or created]
    return ObservedWorkload(
        role=role,
        revision=revision,
        replicas=replicas,
        ready=ready,
        available=available,
        worked=available > 0 or complete or any(is_ready(pod) or _was_ready(pod) for pod in leaders),
        unready_since=_latest(unready_since),
        progressed_at=_latest([created, last_step, *ready_since]),
        unschedulable_since=min((at for pod in pods if (at := _unschedulable_since(pod))), default=None),
        restarts=sum(container.get("restartCount", 0) for pod in pods for container in _containers(pod)),
        last_end=next((end for pod in pods for container in _containers(pod) if (end := _end_of(pod, container))), ""),
    )


def _group_index(pod: Object) -> int:
    return _index(pod, LABEL_GROUP_INDEX)


def _index(pod: Object, label: str) -> int:
    """Returns the number in a label; 0 if it is none, as users may write labels."""
    text = str(pod["metadata"].get("labels", {}).get(label, "0"))
    return int(text) if text.isascii() and text.isdigit() else 0


def _engine(pod: Object, running: Mapping[str, int], *, groups: bool) -> ObservedEngine:
    metadata = pod["metadata"]
    labelled = metadata.get("labels", {}).get(LABEL_DRAINING) == "true"
    since = metadata.get("annotations", {}).get(ANNOTATION_DRAINING_SINCE)
    return ObservedEngine(
        name=metadata["name"],
        ready=is_ready(pod),
        created=time_of(metadata.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC),
        draining_since=time_of(since) if labelled else None,
        running=running.get(metadata["name"]),
        grace_s=pod.get("spec", {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_S),
        index=_group_index(pod) if groups else None,
        started_as="" if groups else str(metadata.get("labels", {}).get(LABEL_ROLE, "")),
    )


def is_ready(pod: Object) -> bool:
    """Returns True if the pod's Ready condition is true."""
    return _condition(pod, "Ready").get("status") == "True"


def newest_ready(pods: Iterable[Object]) -> Object | None:
    """Returns the pod of the engine that was made last, of those that can answer and stay; None if there is none."""
    staying = (pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and worker_index(pod) == 0)
    return max(filter(is_ready, staying), key=lambda pod: pod["metadata"].get("creationTimestamp") or "", default=None)


def time_of(text: str | None) -> datetime | None:
    """Parses the API server's RFC 3339 time. Returns None for any other text: users may write annotations."""
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment and moment.tzinfo is None else moment


def _was_complete(status: Object) -> bool:
    conditions = status.get("conditions", ())
    return any(c["type"] == "Progressing" and c.get("reason") == "NewReplicaSetAvailable" for c in conditions)


def _was_ready(pod: Object) -> bool:
    scheduled, changed = _since(pod, "PodScheduled"), time_of(_condition(pod, "Ready").get("lastTransitionTime"))
    return scheduled is not None and changed is not None and changed - scheduled > AFTER_SCHEDULING


def _unschedulable_since(pod: Object) -> datetime | None:
    condition = _condition(pod, "PodScheduled")
    return _since(pod, "PodScheduled") if condition.get("reason") == "Unschedulable" else None


def _containers(pod: Object) -> Sequence[Object]:
    return (pod.get("status") or {}).get("containerStatuses") or ()


def _end_of(pod: Object, container: Object) -> str:
    """Returns how a container ended the last time, such as `pod demo-1: OOMKilled, exit code 137`; "" if it did not."""
    ended = (container.get("lastState") or {}).get("terminated") or {}
    if not ended:
        return ""
    return f"pod {pod['metadata']['name']}: {ended.get('reason') or 'ended'}, exit code {ended.get('exitCode', '?')}"


def _condition(pod: Object, kind: str) -> Object:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((dict(condition) for condition in conditions if condition["type"] == kind), {})


def _since(pod: Object, kind: str) -> datetime | None:
    moment = _condition(pod, kind).get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return time_of(moment)


def _latest(moments: Iterable[datetime | None]) -> datetime | None:
    return max((moment for moment in moments if moment is not None), default=None)
