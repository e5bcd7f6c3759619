"""What a user is told: status out of spec, observation and plan. Pure; reasons are a closed set (contract)."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from mini_infer_contract.resources import Condition, InferenceService, InferenceServiceStatus, Reason
from mini_infer_operator.observe import Observed
from mini_infer_operator.plan.plan import Plan

EventType = Literal["Normal", "Warning"]
_HARMLESS = {Reason.STARTING, Reason.ROLLING_OUT, Reason.SCALED_TO_ZERO}
Verdict = tuple[bool, str, str]
"""Status, reason, message."""


@dataclass(frozen=True, slots=True)
class PermanentFailure:
    """Something that stands until a user changes something: trying again sooner does not help."""

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
) -> dict[str, Any]:
    """The status of a valid service; `previous` is the stored one: its transition times stay where nothing flips."""
    launched = [workload for workload in plan.workloads if workload.launch is not None]
    current = {(workload.role, workload.revision) for workload in launched}
    wanted = sum(role.replicas for role in service.roles.values())
    new_ready = sum(w.available for w in observed.workloads if (w.role, w.revision) in current)
    ready = sum(w.available for w in observed.workloads)
    existing = sum(w.replicas for w in observed.workloads)
    settled = existing == new_ready == wanted and len(observed.workloads) == len(current)
    verdicts = {
        "Ready": _ready(failure, observed, settled=settled, wanted=wanted, ready=new_ready, old=ready - new_ready),
        "Available": _available(ready),
        "Progressing": _progressing(failure, settled=settled, old=ready - new_ready),
    }
    status = InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        conditions=_conditions(verdicts, service.metadata.generation, previous, now),
        model=service.model_name,
        revision=launched[0].revision if launched else None,
        replicas=existing,
        ready_replicas=ready,
        url=url,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def invalid_status(generation: int, message: str, *, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The status of a stored spec that breaks a rule: what ran before goes on, untouched."""
    verdict = (False, Reason.INVALID_SPEC, message)
    conditions = _conditions({"Ready": verdict, "Progressing": verdict}, generation, previous, now)
    kept = {key: value for key, value in previous.items() if key not in {"conditions", "observedGeneration"}}
    others = [c for c in previous.get("conditions", ()) if c["type"] == "Available"]
    dumped = [condition.model_dump(by_alias=True) for condition in conditions]
    return {**kept, "observedGeneration": generation, "conditions": [*dumped, *others]}


def ready_turn(previous: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, str, EventType] | None:
    """Reason, message and type of an Event where the Ready condition took another reason; None where it did not."""
    before, after = ({c["type"]: c for c in told.get("conditions", ())}.get("Ready", {}) for told in (previous, status))
    if before.get("reason") == after["reason"]:
        return None
    harmless = after["status"] == "True" or after["reason"] in _HARMLESS
    return after["reason"], after["message"], "Normal" if harmless else "Warning"


def _ready(
    failure: PermanentFailure | None, observed: Observed, *, settled: bool, wanted: int, ready: int, old: int
) -> Verdict:
    if failure is not None:
        return False, failure.reason, failure.message
    if settled and not wanted:
        return False, Reason.SCALED_TO_ZERO, "0 replicas are asked for"
    if settled:
        return True, Reason.ALL_REPLICAS_READY, f"{ready} of {wanted} engines are ready"
    message = f"{ready} of {wanted} engines are ready"
    if observed.failures:
        return False, Reason.PODS_FAILING, f"{message}; {'; '.join(observed.failures)}"
    if old:
        return False, Reason.ROLLING_OUT, f"{message}; {old} of older revisions still answer"
    return False, Reason.STARTING, message


def _available(ready: int) -> Verdict:
    if ready:
        return True, Reason.AVAILABLE, f"{ready} engines can answer"
    return False, Reason.NONE_AVAILABLE, "no engine can answer"


def _progressing(failure: PermanentFailure | None, *, settled: bool, old: int) -> Verdict:
    if failure is not None:
        return False, failure.reason, failure.message
    if settled:
        return False, Reason.COMPLETE, "nothing is left to do"
    return True, Reason.ROLLING_OUT if old else Reason.STARTING, "engines are being started or stopped"


def _conditions(
    verdicts: Mapping[str, Verdict], generation: int, previous: Mapping[str, Any], now: datetime
) -> list[Condition]:
    before = {condition["type"]: condition for condition in previous.get("conditions", ())}
    conditions = []
    for kind, (holds, reason, message) in verdicts.items():
        status = "True" if holds else "False"
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
