"""Computes what should run for a service, given what runs. Pure, and the same for a cluster and for local processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from mini_infer_operator.canary.decide import engines_of
from mini_infer_operator.canary.state import CanaryState
from mini_infer_operator.launch import Launch, launch_of, service_revision
from mini_infer_operator.observe import Observed, ObservedWorkload
from mini_infer_operator.plan.drain import drain
from mini_infer_operator.plan.limits import (
    DEFAULT_TIMES,
    FULL_CLUSTER_AFTER,
    RolloutTimes,
    full_cluster_at,
    limits_of,
    times_of,
)
from mini_infer_operator.plan.role_switches import RoleSwitch, choose_switches, with_switches
from mini_infer_operator.plan.rollout import Count, Limits, RoleState, next_replicas_of_roles
from mini_infer_operator.resource import ANSWERING_ROLES, InferenceService

DRAIN_POLL_S = 2.0
"""Seconds between two requests to a draining engine for the number of requests that it still runs."""
CANARY_POLL_S = 2.0
"""Seconds between two judgements of a canary."""
ANNOUNCED_S = 0.5
"""Seconds from the announcement of a canary until its engines are started: gateways have read it by then."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The engines of one role and revision that should exist."""

    role: str
    revision: str
    replicas: int
    launch: Launch | None
    """The engines' start command, or None for an older revision, which goes on as it was started."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The workloads that should exist; everything else of this service is removed."""

    workloads: Sequence[Workload]
    times: RolloutTimes = DEFAULT_TIMES
    draining: frozenset[str] = frozenset()
    """Names of engines that are to be removed. Gateways stop routing to them, and route to all others again."""
    switches: Sequence[RoleSwitch] = ()
    """Engines that change their role first; the workloads' replicas count them in the new one."""
    overdue: bool = False
    """True if the engines that the spec asks for made no progress for longer than the deadline."""
    look_again_s: float = float("inf")
    """Seconds until the plan may change although nothing else does."""
    target: str = ""
    """The revision that is to run: the spec's own, unless that was rolled back."""


def make_plan(service: InferenceService, observed: Observed, now: datetime, canary: CanaryState | None = None) -> Plan:
    """Computes the next state to bring about. Calling it again after each step leads, step by step, to what the spec
    asks for.

    A `canary` that is judged keeps the old revision beside the new one; one that was rolled back keeps it in its place.
    """
    current, times = service_revision(service, observed.default_image), times_of(service)
    target = canary.target(current) if canary is not None else current
    if _waits_for_copy(observed, target):
        return _until_copied(service, observed, target, times)
    is_judged = canary is not None and canary.is_running  # roles stay as they are compared
    switches = [] if is_judged else choose_switches(service, observed, target)
    observed = replace(observed, workloads=with_switches(observed.workloads, switches))
    parts = [_part(service, name, roles, observed, target, now) for name, roles in _PARTS.items()]
    states = {part.name: _with_canary(part.state(times.deadline, now), canary, target) for part in parts}
    stable = canary.stable if canary is not None and canary.is_running else None
    desired = next_replicas_of_roles(target, states, stable)
    workloads: list[Workload] = []
    overdue, moments, draining = False, list[datetime](), set[str]()
    for part in parts:
        drained = drain(desired[part.name], target, part.seen, part.desired + part.limits.surge, now)
        draining |= drained.going
        # what was rolled back stays as what the spec asks for, without engines
        planned = {current: 0} if target != current and part.role is not None else {}
        for revision, replicas in {**planned, **drained.replicas}.items():
            if revision != current:
                if revision in part.seen:
                    workloads.append(Workload(part.seen[revision].role, revision, replicas, None))
            elif part.role is not None:
                launch = launch_of(service, part.role, observed.default_image)
                workloads.append(Workload(part.role, revision, replicas, launch))
        if stable is None:  # a canary has fewer engines than the role wants, and a deadline in its analysis
            overdue |= _overdue(part.seen.get(target), part.desired, times.deadline, now)
        moments += [moment for workload in part.seen.values() for moment in _moments(workload, times.deadline)]
    coming = [(moment - now).total_seconds() for moment in moments if moment > now]
    polls = [DRAIN_POLL_S] if draining else []
    polls += [CANARY_POLL_S if canary.announced else ANNOUNCED_S] if canary is not None and canary.is_running else []
    look_again_s = min([observed.look_again_s, *coming, *polls])
    return Plan(workloads, times, frozenset(draining), switches, overdue, look_again_s, target)


def with_created(workloads: Sequence[ObservedWorkload], plan: Plan) -> list[ObservedWorkload]:
    """Returns the workloads as they are once the plan's new ones exist, whose engines are not ready yet."""
    seen = {(workload.role, workload.revision) for workload in workloads}
    new = [w for w in plan.workloads if w.launch is not None and (w.role, w.revision) not in seen]
    return [*workloads, *(ObservedWorkload(w.role, w.revision, w.replicas, ready=0, available=0) for w in new)]


def _with_canary(state: RoleState, canary: CanaryState | None, target: str) -> RoleState:
    """Returns the role with the limits of a canary: what was rolled back, or is older, is never needed."""
    if canary is None or canary.phase == "Promoted":
        return state
    trusted = {target, canary.stable}
    seen = {
        revision: count if revision in trusted else replace(count, available=0, worked=False)
        for revision, count in state.seen.items()
    }
    if not canary.is_running:
        return replace(state, seen=seen)
    unavailable = min(state.limits.unavailable, max(0, state.desired - 1))  # one old engine to compare with
    limits = Limits(state.limits.surge, unavailable)
    return replace(state, seen=seen, limits=limits, most_new=engines_of(canary, state.desired))


def _waits_for_copy(observed: Observed, current: str) -> bool:
    """True if the model is still to be copied onto its volume, and the current revision has no engine.

    An engine that exists has begun with a complete copy, which a Job that is made again only checks.
    """
    cache = observed.model_cache
    started = sum(workload.replicas for workload in observed.workloads if workload.revision == current)
    return cache is not None and cache.claim is not None and cache.state != "Ready" and not started


def _until_copied(service: InferenceService, observed: Observed, current: str, times: RolloutTimes) -> Plan:
    """Returns the plan until the model is copied: engines of other revisions stay, and none of the current one is
    started, which would wait in its pod and occupy GPUs.
    """
    others = [Workload(w.role, w.revision, w.replicas, None) for w in observed.workloads if w.revision != current]
    launches = [(role, launch_of(service, role, observed.default_image)) for role in service.roles]
    return Plan(
        [*others, *(Workload(role, current, 0, launch) for role, launch in launches)],
        times,
        look_again_s=observed.look_again_s,
        target=current,
    )


_PARTS = {"prefill": ("prefill",), "answering": ANSWERING_ROLES}
"""The two functions that engines have within a service, each with the roles that perform it. An edit may change the
role: decode engines can stand in for unified ones, because both answer clients.
"""


@dataclass(frozen=True, slots=True)
class _Part:
    """The engines that perform one function for the service, in every revision."""

    name: str
    role: str | None
    """The service's role that performs the function, or None if it has no such role now."""
    desired: int
    seen: Mapping[str, ObservedWorkload]
    """The existing workload of each revision; a revision has one role here."""
    limits: Limits
    is_starved: bool

    def state(self, deadline: timedelta, now: datetime) -> RoleState:
        """Returns the part as counts, for `next_replicas_of_roles`."""
        counts = {revision: _count(workload, deadline, now) for revision, workload in self.seen.items()}
        return RoleState(self.desired, counts, self.limits, self.is_starved)


def _part(
    service: InferenceService, name: str, roles: Sequence[str], observed: Observed, current: str, now: datetime
) -> _Part:
    role = next((each for each in roles if each in service.roles), None)
    desired = service.roles[role].replicas if role is not None else 0
    seen = {w.revision: w for w in observed.workloads if w.role in roles}
    limits = limits_of(service.spec.rollout, desired, seen.get(current), now)
    return _Part(name, role, desired, seen, limits, full_cluster_at(seen.get(current), now))


def _count(workload: ObservedWorkload, deadline: timedelta, now: datetime) -> Count:
    since = workload.unready_since
    expired = since is not None and now - since >= deadline
    worked = workload.worked or workload.available > 0
    return Count(workload.replicas, workload.available, worked, expired, workload.available_by_index)


def _overdue(current: ObservedWorkload | None, desired: int, deadline: timedelta, now: datetime) -> bool:
    if current is None or current.progressed_at is None or current.available >= desired:
        return False
    return now - current.progressed_at >= deadline


def _moments(workload: ObservedWorkload, deadline: timedelta) -> list[datetime]:
    """Returns the times at which the passing of time alone changes what `workload` means to a plan."""
    waits = (
        (workload.available_at, timedelta(0)),
        (workload.unready_since, deadline),
        (workload.progressed_at, deadline),
        (workload.unschedulable_since, FULL_CLUSTER_AFTER),
    )
    return [since + wait for since, wait in waits if since is not None]
