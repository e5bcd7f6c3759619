"""A plan as manifests: ControllerRevision and Deployment for each revision; Service, budget and policy for all."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_contract.resources import InferenceService
from mini_infer_operator.objects.controller_revision import controller_revision
from mini_infer_operator.objects.deployment import deployment
from mini_infer_operator.objects.disruption_budget import disruption_budget
from mini_infer_operator.objects.engines_service import engines_service
from mini_infer_operator.objects.metadata import Manifest
from mini_infer_operator.objects.network_policy import Peer, network_policy
from mini_infer_operator.objects.pod import pod_template
from mini_infer_operator.plan.plan import Plan

Templates = Mapping[tuple[str, str], Mapping[str, Any]]
"""Pod templates as once rendered, by role and revision."""


def render(
    service: InferenceService,
    plan: Plan,
    frozen: Templates,
    pull_policy: str | None,
    allowed: Sequence[Peer] = (),
) -> list[Manifest]:
    """Everything that should exist, in the order in which it is to be written.

    A revision that has a frozen template keeps it, so a newer operator that would render it differently rolls nothing.
    """
    optional = (disruption_budget(service), network_policy(service, allowed))
    manifests = [engines_service(service), *(manifest for manifest in optional if manifest is not None)]
    for workload in plan.workloads:
        template = frozen.get((workload.role, workload.revision))
        if template is None and workload.launch is not None:
            template = pod_template(service, workload.role, workload.revision, workload.launch, pull_policy)
        if template is None:
            continue  # an older revision whose template is lost: it stays as it is until it is removed
        manifests += [
            controller_revision(service, workload, template),
            deployment(service, workload, template, plan.times),
        ]
    return manifests
