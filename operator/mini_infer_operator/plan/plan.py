"""What should run for a service, given what runs: pure, and the same for a cluster and for local processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from mini_infer_contract.resources import InferenceService
from mini_infer_operator.launch import Launch, launch_of, service_revision
from mini_infer_operator.observe import Observed, ObservedWorkload
from mini_infer_operator.plan.drain import drain
from mini_infer_operator.plan.limits import DEFAULT_TIMES, FULL_CLUSTER_AFTER, RolloutTimes, limits_of, times_of
from mini_infer_operator.plan.rollout import Count, next_replicas

DRAIN_POLL_S = 2.0
"""Ask engines that are to go this often how many requests they still run."""


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
    times: RolloutTimes = DEFAULT_TIMES
    draining: frozenset[str] = frozenset()
    """Names of engines that are to go; gateways leave them alone, and all others are theirs again."""
    overdue: bool = False
    """Whether the engines that the spec asks for made no progress for longer than the deadline."""
    look_again_s: float = float("inf")
    """When the plan may change although nothing else does."""


def make_plan(service: InferenceService, observed: Observed, now: datetime) -> Plan:
    """The next state to bring about. Calling it again with what came of it leads, step by step, to what was asked."""
    workloads: list[Workload] = []
    current, times = service_revision(service, observed.default_image), times_of(service)
    overdue, moments, draining = False, list[datetime](), set[str]()
    for role, spec in service.roles.items():
        seen = {w.revision: w for w in observed.workloads if w.role == role}
        counts = {revision: _count(workload, times.deadline, now) for revision, workload in seen.items()}
        limits = limits_of(service.spec.rollout, spec.replicas, seen.get(current), now)
        wanted = next_replicas(spec.replicas, current, counts, limits)
        drained = drain(wanted, current, seen, spec.replicas + limits.surge, now)
        draining |= drained.going
        for revision, replicas in drained.replicas.items():
            launch = launch_of(service, role, observed.default_image) if revision == current else None
            workloads.append(Workload(role, revision, replicas, launch))
        overdue |= _overdue(seen.get(current), spec.replicas, times.deadline, now)
        moments += [moment for workload in seen.values() for moment in _moments(workload, times.deadline)]
    coming = [(moment - now).total_seconds() for moment in moments if moment > now]
    look_again_s = min([observed.look_again_s, *coming, *([DRAIN_POLL_S] if draining else ())])
    return Plan(workloads, times, frozenset(draining), overdue, look_again_s)


def _count(workload: ObservedWorkload, deadline: timedelta, now: datetime) -> Count:
    since = workload.unready_since
    expired = since is not None and now - since >= deadline
    return Count(workload.replicas, workload.available, workload.worked or workload.available > 0, expired)


def _overdue(current: ObservedWorkload | None, wanted: int, deadline: timedelta, now: datetime) -> bool:
    if current is None or current.progressed_at is None or current.available >= wanted:
        return False
    return now - current.progressed_at >= deadline


def _moments(workload: ObservedWorkload, deadline: timedelta) -> list[datetime]:
    """When time alone changes what `workload` means to a plan."""
    waits = (
        (workload.available_at, timedelta(0)),
        (workload.unready_since, deadline),
        (workload.progressed_at, deadline),
        (workload.unschedulable_since, FULL_CLUSTER_AFTER),
    )
    return [since + wait for since, wait in waits if since is not None]
