"""Runs the operator's loop for one service: read, resolve, observe, judge, plan, apply, report. Backends (cluster,
this machine) have the side effects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from mini_infer_operator.canary.decide import decide_canary
from mini_infer_operator.observe import Observed
from mini_infer_operator.parse import InvalidServiceError
from mini_infer_operator.plan.decisions import decisions
from mini_infer_operator.plan.plan import Plan, make_plan, with_created
from mini_infer_operator.plan.role_switches import with_switches
from mini_infer_operator.presets.resolve import preset_event, preset_in_force, resolve_or_keep
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.status import (
    EventType,
    PermanentFailure,
    canary_transition,
    invalid_status,
    name_turn,
    ready_transition,
    service_status,
)

RETRY_S = 60.0
"""Seconds until what the API server refused is tried again: only a user can resolve that, in ways that cause no event.
"""


class Backend(Protocol):
    """The place where engines run. Transient errors are raised; a fault that a user must resolve is a
    `PermanentFailure`.
    """

    async def read(self) -> Mapping[str, Any] | None:
        """Returns the stored InferenceService, or None if it is deleted or being deleted."""

    def presets(self) -> Sequence[Mapping[str, Any]] | None:
        """Returns all InferencePresets, or None if they cannot be read."""

    def running_spec(self, stored: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns the spec of the service's last revision, which needs no preset; None if it is not known."""

    async def observe(self, service: InferenceService) -> Observed:
        """Returns the engines that run for the service now, and their failures."""

    async def apply(self, service: InferenceService, plan: Plan) -> PermanentFailure | None:
        """Applies the plan, as far as one step can. Returns the failure that a user must resolve, or None."""

    def url(self, service: InferenceService) -> str | None:
        """Returns the URL at which clients reach the service, or None if there is none."""

    async def report(self, stored: Mapping[str, Any], status: dict[str, Any]) -> None:
        """Reports the status to the user, if it changed."""

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """Records a decision about an object once, as an Event. Returns at once and never fails."""


async def reconcile(backend: Backend) -> float | None:
    """Moves one service one step closer to its spec, whatever happened before.

    Returns the most seconds until the next call. Returns None if the service is deleted: what belonged to it is garbage
    collected (owner references).
    """
    stored = await backend.read()
    if stored is None:
        return None
    now, previous = datetime.now(UTC), stored.get("status") or {}
    try:
        resolved = resolve_or_keep(stored, backend.presets(), lambda: backend.running_spec(stored))
    except InvalidServiceError as error:
        generation = stored["metadata"].get("generation", 0)
        status = invalid_status(generation, str(error), previous=previous, now=now, reason=error.reason)
        await backend.report(stored, status)
        if (transition := ready_transition(previous, status)) is not None:
            backend.record_event(stored, *transition)
        return float("inf")

    service, preset = resolved.service, preset_in_force(resolved, previous)
    observed = await backend.observe(service)
    canary = decide_canary(service, observed, previous, now)
    plan = make_plan(service, observed, now, canary)
    failure = await backend.apply(service, plan)
    if failure is None and resolved.lost is not None:
        failure = PermanentFailure(resolved.lost.reason, str(resolved.lost))
    for decision in decisions(observed, plan) if failure is None else ():
        backend.record_event(stored, decision.reason, decision.message)
    if failure is None:  # new engines exist by now, and those that have just switched are ready in their new role
        observed = replace(observed, workloads=with_created(with_switches(observed.workloads, plan.switches), plan))
    status = service_status(
        service,
        observed,
        plan,
        failure,
        url=backend.url(service),
        previous=previous,
        now=now,
        preset=preset,
        canary=canary,
    )
    await backend.report(stored, status)
    turns = (ready_transition(previous, status), name_turn(service, previous, observed.claimants))
    for transition in (*turns, canary_transition(previous, canary)):
        if transition is not None:
            backend.record_event(stored, *transition)
    if (applied := preset_event(previous, preset)) is not None:
        backend.record_event(stored, *applied)
    return min(plan.look_again_s, RETRY_S if failure else float("inf"))
