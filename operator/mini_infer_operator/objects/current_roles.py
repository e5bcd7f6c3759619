"""Counts pods by the role that their engines have now, and converts such counts to replicas of Deployments. Pure.

A pod stays in the Deployment that made it, whose selector has the role that it started with. A label says the role of
an engine that has switched since, so that every later pass and every other operator knows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mini_infer_operator.objects.observed_workloads import is_ready
from mini_infer_operator.observe import ObservedWorkload, SwitchableEngine
from mini_infer_operator.plan.drain import victims
from mini_infer_operator.plan.plan import Workload
from mini_infer_operator.plan.role_switches import RoleSwitch
from mini_infer_operator.resource import LABEL_CURRENT_ROLE, LABEL_REVISION, LABEL_ROLE, PAIRED_ROLES

Pod = Mapping[str, Any]


def current_role(pod: Pod) -> str:
    """Returns the role that the pod's engine has now."""
    labels = pod["metadata"].get("labels") or {}
    switched = labels.get(LABEL_CURRENT_ROLE)
    return str(switched if switched in PAIRED_ROLES else labels.get(LABEL_ROLE, ""))


def past_switches(pods: Iterable[Pod]) -> list[RoleSwitch]:
    """Returns the switches that the labels of pods say, for `with_switches`."""
    found = []
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        before, after = str(labels.get(LABEL_ROLE, "")), current_role(pod)
        if before != after and "deletionTimestamp" not in pod["metadata"]:
            name, revision = pod["metadata"]["name"], str(labels.get(LABEL_REVISION, ""))
            found.append(RoleSwitch(name, revision, before, after, is_ready(pod)))
    return found


def switchable_engines(
    pods: Iterable[Pod], loads: Mapping[str, float], refused: frozenset[str]
) -> list[SwitchableEngine]:
    """Returns the engines that may switch their role. `loads` are by the pod's name; `refused` are uids of pods."""
    return [
        SwitchableEngine(
            pod["metadata"]["name"],
            current_role(pod),
            str(pod["metadata"]["labels"].get(LABEL_REVISION, "")),
            is_ready(pod),
            loads.get(pod["metadata"]["name"], 0.0),
        )
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and current_role(pod) in PAIRED_ROLES
        and pod["metadata"].get("uid") not in refused
    ]


def by_deployment(
    planned: Sequence[Workload], deployed: Sequence[ObservedWorkload], seen: Sequence[ObservedWorkload]
) -> list[Workload]:
    """Returns the workloads with the replicas of Deployments in place of engines by their current role.

    `deployed` are the workloads by the role that engines started with, `seen` by the one that they have now. New
    engines are started by the Deployment of their role; a removed one leaves the Deployment that made it.
    """
    mixed = {w.revision for w in seen if any(e.started_as != w.role for e in w.engines if e.started_as)}
    wanted = {(w.role, w.revision): w for w in planned}
    result = [workload for workload in planned if workload.revision not in mixed]
    for revision in sorted(mixed):
        replicas = {w.role: w.replicas for w in deployed if w.revision == revision}
        for workload in (w for w in seen if w.revision == revision):
            plan = wanted.get((workload.role, revision))
            target = plan.replicas if plan is not None else 0
            gone = victims(workload, target) if target < workload.replicas else []
            for engine in gone:
                replicas[engine.started_as or workload.role] -= 1
            replicas[workload.role] += target - workload.replicas + len(gone)
        for role in replicas:
            others = [other for other in replicas if other != role]
            if replicas[role] < 0 and others:  # an engine that was counted has gone by itself
                replicas[others[0]] += replicas[role]
                replicas[role] = 0
        for role, count in replicas.items():
            plan = wanted.get((role, revision))
            if count > 0 or plan is not None:
                launch = plan.launch if plan is not None else None
                result.append(Workload(role, revision, max(0, count), launch))
    return result
