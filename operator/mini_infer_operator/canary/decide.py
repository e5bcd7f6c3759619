"""Decides on a canary in each pass: wait, next step, promote or roll back. Pure, and level-triggered.

The decision follows from the spec, the status of the pass before and what is observed, so that an operator that has
just started decides as one that has run for days. A revision that was rolled back stays so until the spec changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from mini_infer_operator.canary.judge import Breach, breach_of
from mini_infer_operator.canary.policy import CanaryPolicy, canary_policy
from mini_infer_operator.canary.state import EDITED_BACK, CanaryState, read_canary
from mini_infer_operator.launch import service_revision
from mini_infer_operator.observe import Observed, ObservedCanary, ObservedWorkload
from mini_infer_operator.resource import ANNOTATION_ABORT, ANNOTATION_PROMOTE, ANSWERING_ROLES, InferenceService

ENOUGH_SAMPLES = 4
"""Answers that are compared, as a multiple of those that must be: engines have better things to do than more."""
FIGURES_EVERY = timedelta(seconds=10)
"""The least time between two writes of figures that decide nothing."""


def decide_canary(
    service: InferenceService, observed: Observed, previous: Mapping[str, Any], now: datetime
) -> CanaryState | None:
    """Returns the state of the service's canary from now on; None if it has none. `previous` is the stored status."""
    policy = canary_policy(service)
    if policy is None:
        return None
    revision, before = service_revision(service, observed.default_image), read_canary(previous)
    if before is not None and before.revision == revision:
        return _continued(service, policy, before, observed, now)
    if before is not None and before.phase != "Promoted" and before.stable == revision:
        return _edited_back(before, observed)
    stable = _stable(before, revision, observed, previous)
    if stable is None:
        return None
    message = f"revision {revision} is judged beside {stable}, in {len(policy.steps)} steps"
    return CanaryState("Running", revision, stable, steps=len(policy.steps), message=message, announced=False)


def engines_of(state: CanaryState, desired: int) -> int:
    """Returns how many of `desired` engines of a role the new revision has: as many as its share needs, at least one.

    It has none in the very first pass.
    """
    if not state.announced:
        return 0
    return min(desired, max(1, -(-state.weight * desired // 100)))


def _continued(
    service: InferenceService, policy: CanaryPolicy, state: CanaryState, observed: Observed, now: datetime
) -> CanaryState:
    wanted = service.metadata.annotations
    if state.phase == "Promoted":
        return state
    if wanted.get(ANNOTATION_PROMOTE) == state.revision:
        return _promoted(state, "PromotedByHand", "promoted by hand")
    if state.is_rolled_back:
        return state
    if wanted.get(ANNOTATION_ABORT) == state.revision:
        return _rolled_back(state, Breach("Aborted", "aborted by hand"))
    state = replace(state, steps=len(policy.steps), step=min(state.step, len(policy.steps) - 1))
    if (observed.canary.revision, observed.canary.step) != (state.revision, state.step):
        observed = replace(observed, canary=ObservedCanary())  # of another step, or of another canary
    engines = [workload for workload in observed.workloads if workload.revision == state.revision]
    if not any(role.replicas for role in service.roles.values()):
        return replace(state, step_began=None, reason="ScaledToZero", message=f"{_where(state)} waits for engines")
    if not any(w.replicas for w in observed.workloads if w.revision == state.stable):
        return _promoted(state, "NothingToCompare", f"no engine of revision {state.stable} is left to compare with")
    breach = breach_of(policy.analysis, observed.canary, engines) or _no_progress(service, state, policy, engines, now)
    state = _with_figures(state, observed, now, at_once=breach is not None)
    if breach is not None:
        return _rolled_back(state, breach)
    step = policy.steps[state.step]
    replays = state.replays < ENOUGH_SAMPLES * policy.analysis.samples
    state = replace(state, weight=step.weight, mirror=step.mirror, replay=replays)
    waits = _why_it_waits(service, policy, state, observed, engines, now)
    if waits is not None:
        return waits
    if state.step + 1 < len(policy.steps):
        step = policy.steps[state.step + 1]
        state = replace(
            state, step=state.step + 1, step_began=None, weight=step.weight, mirror=step.mirror, requests=0, errors=0
        )
        return replace(state, reason="NextStep", message=f"{_where(state)} begins")
    answers = "" if state.divergence is None else f", {state.replays} answers differ by {state.divergence:.3f} nats"
    return _promoted(state, "AnalysisPassed", f"kept all limits in {state.steps} steps{answers}")


def _why_it_waits(
    service: InferenceService,
    policy: CanaryPolicy,
    state: CanaryState,
    observed: Observed,
    engines: Sequence[ObservedWorkload],
    now: datetime,
) -> CanaryState | None:
    """Returns the state of a canary that stays at its step, with the reason; None if the step is over."""
    if missing := _missing(service, state, engines):
        return replace(state, step_began=None, reason="EnginesMissing", message=f"{_where(state)} waits for {missing}")
    if state.step_began is None:
        return replace(state, step_began=now, reason="Analysing", message=f"{_where(state)} is analysed")
    new, elapsed_s = observed.canary.new, (now - state.step_began).total_seconds()
    rollout = service.spec.rollout
    if rollout is not None and rollout.paused:
        return replace(state, reason="Paused", message=f"{_where(state)} is paused: mini-infer rollout resume")
    if elapsed_s < policy.steps[state.step].pause_s:
        return replace(state, reason="Analysing", message=f"{_where(state)} is analysed")
    if not observed.canary.is_reported:
        message = f"{_where(state)} waits for gateways, which do not report: check --gateways, or promote by hand"
        return replace(state, reason="NoGatewayReports", message=message)
    least, limits = policy.analysis.min_requests, policy.analysis
    if elapsed_s < policy.deadline_s and new.requests < least:
        message = f"{_where(state)} waits for more than {new.requests} of {least} requests"
        return replace(state, reason="FewRequests", message=message)
    is_last = state.step + 1 == len(policy.steps)
    if is_last and elapsed_s < policy.deadline_s and new.replays < limits.samples:
        message = f"{_where(state)} waits for more than {new.replays} of {limits.samples} compared answers"
        return replace(state, reason="FewAnswers", message=message)
    return None


def _missing(service: InferenceService, state: CanaryState, engines: Sequence[ObservedWorkload]) -> str:
    """Returns which engines the step lacks; "" if it has all."""
    for name, role in service.roles.items():
        wanted = engines_of(state, role.replicas) if role.replicas else 0
        available = sum(workload.available for workload in engines if workload.role == name)
        if available < wanted:
            return f"{name} engines ({available} of {wanted} are available)"
    return ""


def _no_progress(
    service: InferenceService,
    state: CanaryState,
    policy: CanaryPolicy,
    engines: Sequence[ObservedWorkload],
    now: datetime,
) -> Breach | None:
    missing = _missing(service, state, engines)
    moments = [workload.progressed_at for workload in engines if workload.progressed_at is not None]
    if not missing or not moments or (now - max(moments)).total_seconds() < policy.deadline_s:
        return None
    return Breach("NoProgress", f"no engine got ready for {policy.deadline_s:.0f} s: {missing}")


def _with_figures(state: CanaryState, observed: Observed, now: datetime, *, at_once: bool) -> CanaryState:
    """Adds the present figures, unless they were written a moment ago and nothing is decided by them."""
    new = observed.canary.new
    is_recent = state.observed_at is not None and now - state.observed_at < FIGURES_EVERY
    if not observed.canary.is_reported or (is_recent and not at_once):
        return state
    divergence = new.divergence_sum / new.replays if new.replays else state.divergence
    replays = new.replays or state.replays
    return replace(
        state, requests=new.requests, errors=new.errors, replays=replays, divergence=divergence, observed_at=now
    )


def _stable(before: CanaryState | None, revision: str, observed: Observed, previous: Mapping[str, Any]) -> str | None:
    """Returns the revision to compare with: the one that has served last and still has engines that worked."""
    able = [w for w in observed.workloads if w.revision != revision and w.replicas and (w.worked or w.available)]
    answering = {workload.revision for workload in able if workload.role in ANSWERING_ROLES}
    served = None
    if before is not None:
        served = before.revision if before.phase == "Promoted" else before.stable
    for candidate in (served, previous.get("revision")):
        if candidate in answering:
            return candidate
    best = max((w for w in able if w.role in ANSWERING_ROLES), key=lambda w: (w.available, w.revision), default=None)
    return None if best is None else best.revision


def _edited_back(before: CanaryState, observed: Observed) -> CanaryState | None:
    """Returns the state after the spec went back to the old revision, until no engine of the new one is left."""
    if not any(workload.replicas for workload in observed.workloads if workload.revision == before.revision):
        return None
    if before.is_rolled_back:
        return before
    return _rolled_back(before, Breach(EDITED_BACK, "the spec asks for the old revision again"))


def _promoted(state: CanaryState, reason: str, why: str) -> CanaryState:
    message = f"revision {state.revision} replaces {state.stable}: {why}"
    return replace(
        state, phase="Promoted", reason=reason, message=message, weight=100, mirror=0, replay=False, step_began=None
    )


def _rolled_back(state: CanaryState, breach: Breach) -> CanaryState:
    message = f"revision {state.revision} was rolled back to {state.stable} in step {state.step + 1} of {state.steps}: "
    return replace(
        state,
        phase="RolledBack",
        reason=breach.reason,
        message=message + breach.message,
        weight=0,
        mirror=0,
        replay=False,
        step_began=None,
    )


def _where(state: CanaryState) -> str:
    share = f"copies of {state.mirror} % of the requests" if state.mirror else f"{state.weight} % of the sessions"
    return f"step {state.step + 1} of {state.steps} ({share})"
