"""What should run for a service, given what runs: pure, and the same for a cluster and for local processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from mini_infer_contract.resources import InferenceService
from mini_infer_operator.launch import Launch, launch_of, service_revision
from mini_infer_operator.observe import Observed
from mini_infer_operator.plan.rollout import Count, next_replicas


@dataclass(frozen=True, slots=True)
class Workload:
    """Engines of one role and revision that should exist."""

    role: str
    revision: str
    replicas: int
    launch: Launch | None
    """None: an older revision, which goes on as it was started."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What should exist; everything else of this service is removed."""

    workloads: Sequence[Workload]


def make_plan(service: InferenceService, observed: Observed, now: datetime) -> Plan:
    """The next state to bring about. Calling it again with what came of it leads, step by step, to what was asked."""
    workloads: list[Workload] = []
    current = service_revision(service, observed.default_image)
    for role, spec in service.roles.items():
        seen = {w.revision: Count(w.replicas, w.available) for w in observed.workloads if w.role == role}
        for revision, replicas in next_replicas(spec.replicas, current, seen).items():
            launch = launch_of(service, role, observed.default_image) if revision == current else None
            workloads.append(Workload(role, revision, replicas, launch))
    return Plan(workloads)
