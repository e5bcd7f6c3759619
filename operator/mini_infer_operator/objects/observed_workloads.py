"""Deployments and pods as the counts and times that planning reads. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from mini_infer_contract.resources import ANNOTATION_DRAINING_SINCE, LABEL_DRAINING, LABEL_REVISION, LABEL_ROLE
from mini_infer_operator.launch import DEFAULT_GRACE_S
from mini_infer_operator.objects.ownership import revision_key
from mini_infer_operator.observe import ObservedEngine, ObservedWorkload

Object = Mapping[str, Any]

AFTER_SCHEDULING = timedelta(seconds=5)
"""A pod whose readiness changed this long after it got its node was ready before: kubelet writes the first value at
once, and a container that never gets ready does not change it."""


def observed_workloads(
    deployments: Iterable[Object], pods: Iterable[Object], running: Mapping[str, int] | None = None
) -> list[ObservedWorkload]:
    """One for each Deployment that is not being deleted; `running` is what draining pods say, by name."""
    pods_of: dict[tuple[str, str], list[Object]] = defaultdict(list)
    leaving = False
    for pod in pods:
        leaving |= "deletionTimestamp" in pod["metadata"]
        labels = pod["metadata"].get("labels", {})
        if "deletionTimestamp" not in pod["metadata"]:
            pods_of[str(labels.get(LABEL_ROLE, "")), str(labels.get(LABEL_REVISION, ""))].append(pod)
    living = [deployment for deployment in deployments if "deletionTimestamp" not in deployment["metadata"]]
    seen = [_observed(deployment, pods_of[revision_key(deployment)], running or {}) for deployment in living]
    # what an engine that is ending frees may be all that a new one waits for
    return [replace(workload, unschedulable_since=None) for workload in seen] if leaving else seen


def _observed(deployment: Object, pods: Sequence[Object], running: Mapping[str, int]) -> ObservedWorkload:
    role, revision = revision_key(deployment)
    status, metadata = deployment.get("status", {}), deployment["metadata"]
    replicas = deployment["spec"].get("replicas", 1)
    ready = min(replicas, status.get("readyReplicas", 0))
    available = min(ready, status.get("availableReplicas", 0))
    created, last_step = time_of(metadata.get("creationTimestamp")), time_of(metadata.get("lastApplied"))
    unready_since = [_since(pod, "Ready") for pod in pods if not is_ready(pod)]
    ready_since = [_since(pod, "Ready") for pod in pods if is_ready(pod)]
    if ready < replicas and len(pods) < replicas:  # some are not even made yet
        unready_since += [last_step or created]
    return ObservedWorkload(
        role=role,
        revision=revision,
        replicas=replicas,
        ready=ready,
        available=available,
        worked=available > 0 or _was_complete(status) or any(is_ready(pod) or _was_ready(pod) for pod in pods),
        unready_since=_latest(unready_since),
        progressed_at=_latest([created, last_step, *ready_since]),
        engines=[_engine(pod, running) for pod in pods],
        unschedulable_since=min((at for pod in pods if (at := _unschedulable_since(pod))), default=None),
    )


def _engine(pod: Object, running: Mapping[str, int]) -> ObservedEngine:
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
    )


def is_ready(pod: Object) -> bool:
    """As the condition says."""
    return _condition(pod, "Ready").get("status") == "True"


def time_of(text: str | None) -> datetime | None:
    """RFC 3339, as the API server writes it."""
    return datetime.fromisoformat(text) if text else None


def _was_complete(status: Object) -> bool:
    conditions = status.get("conditions", ())
    return any(c["type"] == "Progressing" and c.get("reason") == "NewReplicaSetAvailable" for c in conditions)


def _was_ready(pod: Object) -> bool:
    scheduled, changed = _since(pod, "PodScheduled"), time_of(_condition(pod, "Ready").get("lastTransitionTime"))
    return scheduled is not None and changed is not None and changed - scheduled > AFTER_SCHEDULING


def _unschedulable_since(pod: Object) -> datetime | None:
    condition = _condition(pod, "PodScheduled")
    return _since(pod, "PodScheduled") if condition.get("reason") == "Unschedulable" else None


def _condition(pod: Object, kind: str) -> Object:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((dict(condition) for condition in conditions if condition["type"] == kind), {})


def _since(pod: Object, kind: str) -> datetime | None:
    moment = _condition(pod, kind).get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return time_of(moment)


def _latest(moments: Iterable[datetime | None]) -> datetime | None:
    return max((moment for moment in moments if moment is not None), default=None)
