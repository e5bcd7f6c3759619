"""Renders a plan as manifests: ControllerRevision and workload of each role and revision; Service, budgets, policy."""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.objects.controller_revision import controller_revision
from mini_infer_operator.objects.deployment import deployment
from mini_infer_operator.objects.disruption_budget import disruption_budgets
from mini_infer_operator.objects.engines_service import engines_service
from mini_infer_operator.objects.leader_worker_set import leader_worker_set
from mini_infer_operator.objects.metadata import Manifest
from mini_infer_operator.objects.network_policy import NOBODY, network_policy
from mini_infer_operator.objects.pod import frozen_pods
from mini_infer_operator.objects.weights_service import weights_service
from mini_infer_operator.plan.plan import Plan
from mini_infer_operator.plan.role_switches import roles_are_interchangeable
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.settings import EnginePeers

Frozen = Mapping[tuple[str, str], Mapping[str, Any]]
"""Pod templates as first rendered (pod.py), by role and revision."""


def render(
    service: InferenceService,
    plan: Plan,
    frozen: Frozen,
    pull_policy: str | None,
    allowed: EnginePeers = NOBODY,
    *,
    has_switched: bool = False,
) -> list[Manifest]:
    """Returns all manifests that should exist, in the order in which they are to be written.

    A revision that has a frozen template keeps it, so an upgraded operator that would render it differently rolls
    nothing. `has_switched`: an engine has another role now than its pod's label of the role says.
    """
    is_fluid = has_switched or roles_are_interchangeable(service)
    manifests = [engines_service(service, plan, is_fluid=is_fluid), weights_service(service)]
    manifests += disruption_budgets(service, is_fluid=is_fluid)
    policy = network_policy(service, allowed)
    manifests += [policy] if policy is not None else []
    for workload in plan.workloads:
        pods = frozen.get((workload.role, workload.revision))
        if pods is None and workload.launch is not None:
            pods = frozen_pods(service, workload.role, workload.revision, workload.launch, pull_policy)
        if pods is None:
            continue  # an older revision whose template is lost: it stays as it is until it is removed
        manifests.append(controller_revision(service, workload, pods))
        if "size" in pods:
            manifests.append(leader_worker_set(service, workload, pods))
        else:
            manifests.append(deployment(service, workload, pods["template"], plan.times))
    return manifests
