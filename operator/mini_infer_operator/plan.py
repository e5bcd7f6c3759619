"""What should run for a service, given what runs: pure, and the same for a cluster and for local processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer_contract.resources import InferenceService
from mini_infer_operator.launch import Launch, launch_of, revision_of
from mini_infer_operator.rollout import Count, roll


@dataclass(frozen=True, slots=True)
class ObservedWorkload:
    """The engines of one role and revision, as seen."""

    role: str
    revision: str
    replicas: int
    """Asked for."""
    available: int
    """Able to answer."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that planning and status need to know of the world."""

    workloads: Sequence[ObservedWorkload] = ()
    failures: Sequence[str] = ()
    """Why engines do not come up, one sentence each, in Kubernetes' own words where there are some."""


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


def make_plan(service: InferenceService, observed: Observed, default_image: str) -> Plan:
    """The next state to bring about. Calling it again with what came of it leads, step by step, to what was asked."""
    workloads: list[Workload] = []
    for role, spec in service.roles.items():
        current = revision_of(service, role, default_image)
        seen = {w.revision: Count(w.replicas, w.available) for w in observed.workloads if w.role == role}
        for revision, replicas in roll(spec.replicas, current, seen).items():
            launch = launch_of(service, role, default_image) if revision == current else None
            workloads.append(Workload(role, revision, replicas, launch))
    return Plan(workloads)
