"""Computes the status that a user reads from spec, observation and plan. Pure; reasons are a closed set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from mini_infer_operator.canary.state import CanaryState, read_canary
from mini_infer_operator.gpus import gpus_of_engine
from mini_infer_operator.launch import service_revision
from mini_infer_operator.observe import Failure, Observed
from mini_infer_operator.plan.plan import Plan
from mini_infer_operator.resource import (
    ANSWERING_ROLES,
    LABEL_ROLE,
    LABEL_SERVICE,
    Condition,
    InferenceService,
    InferenceServiceStatus,
    ModelCacheStatus,
    PresetStatus,
    Reason,
    RoleSpec,
    RoleStatus,
)

EventType = Literal["Normal", "Warning"]
_HARMLESS = {Reason.STARTING, Reason.ROLLING_OUT}
Verdict = tuple[bool, str, str]
"""The status, reason and message of a condition."""


@dataclass(frozen=True, slots=True)
class PermanentFailure:
    """A fault that stays until a user changes something: retrying sooner does not help."""

    reason: str
    message: str


def service_status(
    service: InferenceService,
    observed: Observed,
    plan: Plan,
    failure: PermanentFailure | None,
    *,
    url: str | None,
    previous: Mapping[str, Any],
    now: datetime,
    preset: PresetStatus | None = None,
    canary: CanaryState | None = None,
) -> dict[str, Any]:
    """Returns the status of a valid service. `previous` is the stored status: a transition time changes only with its
    condition.
    """
    launched = [workload for workload in plan.workloads if workload.launch is not None]
    target = plan.target or next((workload.revision for workload in launched), "")
    running = {(workload.role, workload.revision) for workload in plan.workloads if workload.revision == target}
    look = _look(service, observed, running, previous)
    verdicts = {
        "Ready": _ready(failure, look, _copying(observed.model_cache)),
        "Available": _available(look.answering),
        **_progress(failure, look, plan),
    }
    if failure is None and canary is not None:
        verdicts |= _canary_verdicts(canary, service_revision(service, observed.default_image), verdicts)
    verdicts |= _ownership(service, observed.claimants)
    status = InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        conditions=_conditions(verdicts, service.metadata.generation, previous, now),
        model=_name_for_clients(service, observed.claimants),
        model_impl=observed.model_impl or previous.get("modelImpl"),
        model_cache=observed.model_cache,
        preset=preset,
        revision=launched[0].revision if launched else None,
        canary=canary.status() if canary is not None else None,
        replicas=look.existing,
        ready_replicas=look.ready,
        roles=_roles(service, look),
        tensor_parallel=_tensor_parallel(service),
        gpus=sum(role.replicas * gpus_of_engine(role) for role in service.roles.values()),
        selector=role_selector(service, "unified") if "unified" in service.roles else None,
        url=url,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def invalid_status(
    generation: int,
    message: str,
    *,
    previous: Mapping[str, Any],
    now: datetime,
    reason: str = Reason.INVALID_SPEC,
) -> dict[str, Any]:
    """Returns the status of a stored spec that breaks a rule: what ran before goes on, untouched."""
    verdict = (False, reason, message)
    stalled = (True, reason, message)
    verdicts = {"Ready": verdict, "Progressing": verdict, "Stalled": stalled}
    conditions = _conditions(verdicts, generation, previous, now)
    kept = {key: value for key, value in previous.items() if key not in {"conditions", "observedGeneration"}}
    others = [c for c in previous.get("conditions", ()) if c["type"] == "Available"]
    dumped = [condition.model_dump(by_alias=True) for condition in conditions]
    return {**kept, "observedGeneration": generation, "conditions": [*dumped, *others]}


def error_status(generation: int, message: str, *, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Returns the status while requests fail again and again: what ran before goes on, and the operator retries."""
    verdicts = dict.fromkeys(("Ready", "Progressing"), (False, Reason.API_ERROR, message))
    conditions = _conditions(verdicts, generation, previous, now)
    dumped = [condition.model_dump(by_alias=True) for condition in conditions]
    others = [c for c in previous.get("conditions", ()) if c["type"] == "Available"]
    return {**previous, "observedGeneration": generation, "conditions": [*dumped, *others]}


def ready_transition(previous: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, str, EventType] | None:
    """Returns reason, message and type of an Event if the Ready condition's reason changed, else None.

    The first start of a service has the Event of its revision alone.
    """
    before, after = (
        {c["type"]: c for c in state.get("conditions", ())}.get("Ready", {}) for state in (previous, status)
    )
    if before.get("reason", Reason.STARTING) == after["reason"]:
        return None
    harmless = after["status"] == "True" or after["reason"] in _HARMLESS
    return after["reason"], after["message"], "Normal" if harmless else "Warning"


def canary_transition(previous: Mapping[str, Any], canary: CanaryState | None) -> tuple[str, str, EventType] | None:
    """Returns reason, message and type of an Event if a canary began, went on to another step, or ended."""
    before = read_canary(previous)
    if canary is None or (before and _place(before) == _place(canary)):
        return None
    if canary.is_rolled_back:
        return "CanaryRolledBack", canary.message, "Warning"
    if canary.phase == "Promoted":
        return "CanaryPromoted", canary.message, "Normal"
    if before is None or before.revision != canary.revision:
        return "CanaryStarted", canary.message, "Normal"
    return "CanaryStep", canary.message, "Normal"


def _place(canary: CanaryState) -> tuple[str, str, int]:
    return canary.revision, canary.phase, canary.step


def _canary_verdicts(canary: CanaryState, revision: str, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Returns the conditions of a canary that is judged or was rolled back; none if it is over."""
    if canary.revision != revision or canary.phase == "Promoted":
        return {}
    if canary.is_rolled_back:
        failed = (False, Reason.CANARY_ROLLED_BACK, canary.message)
        return {"Ready": failed, "Progressing": failed, "Stalled": (True, *failed[1:])}
    going = (True, Reason.CANARY, canary.message)
    stalled = {"Progressing": going} if "Stalled" in verdicts else {"Progressing": going, "Reconciling": going}
    is_ready, reason, message = verdicts["Ready"]
    return stalled | {"Ready": (is_ready, reason, f"{message}; {canary.message}")}


def name_turn(
    service: InferenceService, previous: Mapping[str, Any], claimants: Sequence[str]
) -> tuple[str, str, EventType] | None:
    """Returns reason, message and type of an Event if the bare model name changed hands, else None."""
    me, before = f"{service.metadata.namespace}/{service.metadata.name}", previous.get("model")
    after = _name_for_clients(service, claimants)
    if me not in (before, after) or before == after:
        return None
    detail = f"clients that ask for {service.model_name} reach"
    if after != me:
        return "ModelNameGained", f"{detail} this service from now on: no older service claims that name now", "Normal"
    return "ModelNameLost", f"{detail} {claimants[0]}, which is older; this service answers to {me}", "Warning"


def progress_ended(previous: Mapping[str, Any], status: Mapping[str, Any], now: datetime) -> tuple[str, float] | None:
    """Returns the reason and the seconds of a progress that has just ended; None if it goes on, or there was none."""
    before, after = (
        {c["type"]: c for c in state.get("conditions", ())}.get("Progressing", {}) for state in (previous, status)
    )
    if before.get("status") != "True" or after.get("reason") != Reason.COMPLETE:
        return None
    try:  # Others may write a status, too.
        began = datetime.fromisoformat(before.get("lastTransitionTime", ""))
        return before.get("reason", ""), (now - began).total_seconds()
    except (ValueError, TypeError):
        return None


def role_selector(service: InferenceService, role: str) -> str:
    """Returns the label selector of a role's engines, for autoscalers."""
    return f"{LABEL_SERVICE}={service.metadata.name},{LABEL_ROLE}={role}"


def _roles(service: InferenceService, look: "_Look") -> list[RoleStatus]:
    return [
        RoleStatus(
            name=role.name,
            replicas=role.existing,
            ready_replicas=role.current_ready,
            ready=f"{role.current_ready}/{role.desired}",
            gpus=gpus_of_engine(service.roles[role.name]),
            **_scaling(service.roles[role.name]),
        )
        for role in look.roles
    ]


def _scaling(role: RoleSpec) -> dict[str, Any]:
    """Returns who sets the role's number, and the planner's number; empty without `scaling`."""
    if role.scaling is None:
        return {}
    if role.scaling.is_planned:
        return {"scaled_by": "Planner", "wanted": role.replicas}
    return {"scaled_by": "Autoscaler"}


def _tensor_parallel(service: InferenceService) -> str | None:
    """Returns `2`, or `1/2` if prefill and decode differ; None if no role gives a size."""
    sizes = [role.parallelism.tensor if role.parallelism else None for role in service.roles.values()]
    if not any(sizes):
        return None
    detail = [str(size or 1) for size in sizes]
    return detail[0] if len(set(detail)) == 1 else "/".join(detail)


@dataclass(frozen=True, slots=True)
class _RoleLook:
    """Counts of the engines of one role."""

    name: str
    desired: int
    current: int
    """The number of existing engines of the wanted revision."""
    current_ready: int
    existing: int
    """The number of existing engines of all revisions."""

    @property
    def settled(self) -> bool:
        """True if exactly the wanted engines exist, and all are ready."""
        return self.existing == self.current_ready == self.desired


@dataclass(frozen=True, slots=True)
class _Look:
    """Counts of a service's engines, with their failures."""

    roles: Sequence[_RoleLook]
    existing: int
    """The number of existing engines of all roles and revisions."""
    ready: int
    answering: int
    """The number of ready engines that answer clients."""
    has_older: bool
    """True if there are engines of older revisions."""
    settled: bool
    was_ready: bool
    """True if every engine was ready at some time since the spec was last edited."""
    failures: Sequence[Failure]
    paused: bool

    @property
    def desired(self) -> int:
        """The number of engines wanted, over all roles."""
        return sum(role.desired for role in self.roles)

    @property
    def old_ready(self) -> int:
        """The number of ready engines of older revisions."""
        return self.ready - sum(role.current_ready for role in self.roles)

    @property
    def surplus(self) -> int:
        """The number of engines of the wanted revision beyond the wanted number."""
        return sum(max(0, max(role.current, role.current_ready) - role.desired) for role in self.roles)

    @property
    def lost(self) -> int:
        """The number of wanted engines that are not ready."""
        return sum(max(0, role.desired - role.current_ready) for role in self.roles)

    @property
    def summary(self) -> str:
        """A phrase that counts the ready engines, by role if there are several roles."""
        counts = {role.name: f"{min(role.current_ready, role.desired)} of {role.desired}" for role in self.roles}
        named = [f"{name} {count}" for name, count in counts.items()] if len(counts) > 1 else list(counts.values())
        return f"{' and '.join(named)} engines are ready"


def _look(
    service: InferenceService, observed: Observed, current: set[tuple[str, str]], previous: Mapping[str, Any]
) -> _Look:
    roles = [_role_look(name, role.replicas, observed, current) for name, role in service.roles.items()]
    existing = sum(w.replicas for w in observed.workloads)
    before = {c["type"]: c for c in previous.get("conditions", ())}.get("Ready", {})
    same_spec = before.get("observedGeneration") == service.metadata.generation
    was_ready = before.get("status") == "True" or before.get("reason") == Reason.REPLACING_ENGINES
    return _Look(
        roles=roles,
        existing=existing,
        ready=sum(w.ready for w in observed.workloads),
        answering=sum(w.ready for w in observed.workloads if w.role in ANSWERING_ROLES),
        has_older=any((w.role, w.revision) not in current for w in observed.workloads),
        settled=all(role.settled for role in roles) and len(observed.workloads) == len(current),
        was_ready=same_spec and was_ready,
        failures=observed.failures,
        paused=service.spec.rollout is not None and service.spec.rollout.paused is True,
    )


def _role_look(name: str, desired: int, observed: Observed, current: set[tuple[str, str]]) -> _RoleLook:
    mine = [w for w in observed.workloads if w.role == name]
    of_current = [w for w in mine if (w.role, w.revision) in current]
    return _RoleLook(
        name=name,
        desired=desired,
        current=sum(w.replicas for w in of_current),
        current_ready=sum(w.ready for w in of_current),
        existing=sum(w.replicas for w in mine),
    )


def _copying(cache: ModelCacheStatus | None) -> str:
    """Returns a phrase about a copy of the model that goes on, or ""."""
    if cache is None or cache.state not in ("Waiting", "Copying"):
        return ""
    share = "" if cache.percent is None else f" ({cache.percent} % of {(cache.total_bytes or 0) / 1e9:.1f} GB)"
    where = f"onto claim {cache.claim}" if cache.claim is not None else f"into {cache.host_path} of a node"
    return f"; the model is being copied {where}{share}" if cache.claim is not None or cache.state == "Copying" else ""


def _ready(failure: PermanentFailure | None, look: _Look, copying: str) -> Verdict:
    if failure is not None:
        return False, failure.reason, failure.message
    if look.settled and not look.desired:
        return True, Reason.SCALED_TO_ZERO, "0 replicas are asked for, and none runs"
    message = look.summary
    if look.settled:
        return True, Reason.ALL_REPLICAS_READY, message
    message += copying
    reason, more = _unsettled(look)
    if reason == Reason.SCALING_DOWN:
        return True, reason, f"{message}; {more}"
    if look.failures:
        detail = "; ".join(failure.message for failure in look.failures)
        answering = f", {more}" if reason == Reason.ROLLING_OUT and more else ""
        return False, look.failures[0].reason, f"{message}{answering}; {detail}"
    return False, reason, f"{message}; {more}" if more else message


def _unsettled(look: _Look) -> tuple[str, str]:
    """Returns the reason for which the service is not settled, and the rest of a sentence about it."""
    if look.has_older:
        return Reason.ROLLING_OUT, f"{look.old_ready} of older revisions still answer" if look.old_ready else ""
    if not look.lost:
        more = look.surplus
        return Reason.SCALING_DOWN, f"{more} more {'is' if more == 1 else 'are'} being stopped"
    if look.was_ready and all(role.current == role.desired for role in look.roles):
        lost = look.lost
        return Reason.REPLACING_ENGINES, f"{lost} {'was' if lost == 1 else 'were'} lost and {_is_are(lost)} replaced"
    return Reason.STARTING, ""


def _is_are(count: int) -> str:
    return "is being" if count == 1 else "are being"


def _available(ready: int) -> Verdict:
    if ready:
        return True, Reason.AVAILABLE, f"{ready} {'engine' if ready == 1 else 'engines'} can answer"
    return False, Reason.NONE_AVAILABLE, "no engine can answer"


def _progress(failure: PermanentFailure | None, look: _Look, plan: Plan) -> dict[str, Verdict]:
    """Returns Progressing, and the conditions of tools that wait by kstatus' rules: Reconciling and Stalled, only while
    true.
    """
    if failure is not None:
        return {
            "Progressing": (False, failure.reason, failure.message),
            "Stalled": (True, failure.reason, failure.message),
        }
    if look.settled and look.paused:
        message = "rollouts are paused and edits wait: mini-infer rollout resume NAME, or rollout.paused: false"
        return {"Progressing": (False, Reason.PAUSED, message)}
    if look.settled:
        return {"Progressing": (False, Reason.COMPLETE, "nothing is left to do")}
    if plan.overdue:
        detail = "; ".join(["", *(failure.message for failure in look.failures)])
        message = f"no engine got ready for {plan.times.deadline.total_seconds():.0f} s, what serves is kept{detail}"
        late = (False, Reason.PROGRESS_DEADLINE_EXCEEDED, message)
        return {"Progressing": late, "Stalled": (True, *late[1:])}
    going = (True, _unsettled(look)[0], "engines are being started or stopped")
    return {"Progressing": going, "Reconciling": going}


def _name_for_clients(service: InferenceService, claimants: Sequence[str]) -> str:
    me = f"{service.metadata.namespace}/{service.metadata.name}"
    return me if claimants and claimants[0] != me else service.model_name


def _ownership(service: InferenceService, claimants: Sequence[str]) -> dict[str, Verdict]:
    """Returns the ModelNameOwned condition, if several services claim the model name."""
    if len(claimants) < 2:
        return {}
    me, owner = f"{service.metadata.namespace}/{service.metadata.name}", claimants[0]
    if me == owner:
        others = ", ".join(claimants[1:4]) + (f" and {len(claimants) - 4} more" if len(claimants) > 4 else "")
        detail = f"clients that ask for {service.model_name} reach this service, the oldest; {others} claim it too"
        return {"ModelNameOwned": (True, Reason.MODEL_NAME_SHARED, detail)}
    detail = f"clients that ask for {service.model_name} reach {owner}, which is older; this service answers to {me}"
    return {"ModelNameOwned": (False, Reason.MODEL_NAME_SHARED, detail)}


def _conditions(
    verdicts: Mapping[str, Verdict], generation: int, previous: Mapping[str, Any], now: datetime
) -> list[Condition]:
    before = {condition["type"]: condition for condition in previous.get("conditions", ())}
    conditions = []
    for kind, (is_true, reason, message) in verdicts.items():
        status = "True" if is_true else "False"
        old = before.get(kind, {})
        kept_time = old.get("lastTransitionTime") if old.get("status") == status else None
        conditions.append(
            Condition.model_validate(
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": message[:32768],
                    "lastTransitionTime": kept_time or now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                    "observedGeneration": generation,
                }
            )
        )
    return conditions
