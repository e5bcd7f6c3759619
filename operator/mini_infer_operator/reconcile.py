"""The operator in one function: read, observe, plan, apply, report. Backends (cluster, this machine) do the effects."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from mini_infer_operator.observe import Observed
from mini_infer_operator.parse import InvalidServiceError, parse_service
from mini_infer_operator.plan.decisions import decisions
from mini_infer_operator.plan.plan import Plan, make_plan
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.status import EventType, PermanentFailure, invalid_status, ready_turn, service_status

RETRY_S = 60.0
"""Try again this soon what the API server refused: only a user can end that, in ways that cause no event."""


class Backend(Protocol):
    """Where engines run. Errors that pass by themselves are raised; what a user must solve is a PermanentFailure."""

    async def read(self) -> Mapping[str, Any] | None:
        """The InferenceService as stored; None once it is gone or going."""

    async def observe(self, service: InferenceService) -> Observed:
        """What runs for it now."""

    async def apply(self, service: InferenceService, plan: Plan) -> PermanentFailure | None:
        """Bring the plan about, as far as one step goes."""

    def url(self, service: InferenceService) -> str | None:
        """Where clients find it."""

    async def report(self, stored: Mapping[str, Any], status: dict[str, Any]) -> None:
        """Tell the user, if it is news."""

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """Tell of a decision about an object, once; returns at once and never fails."""


async def reconcile(backend: Backend) -> float | None:
    """Bring one service one step closer to its spec, whatever happened before. Seconds until the next look, at most.

    None: the service is gone, and what belonged to it goes by itself (owner references).
    """
    stored = await backend.read()
    if stored is None:
        return None
    now, previous = datetime.now(UTC), stored.get("status") or {}
    try:
        service = parse_service(stored)
    except InvalidServiceError as error:
        generation = stored["metadata"].get("generation", 0)
        status = invalid_status(generation, str(error), previous=previous, now=now)
        await backend.report(stored, status)
        if (turn := ready_turn(previous, status)) is not None:
            backend.record_event(stored, *turn)
        return float("inf")

    observed = await backend.observe(service)
    plan = make_plan(service, observed, now)
    failure = await backend.apply(service, plan)
    for decision in decisions(observed, plan) if failure is None else ():
        backend.record_event(stored, decision.reason, decision.message)
    status = service_status(service, observed, plan, failure, url=backend.url(service), previous=previous, now=now)
    await backend.report(stored, status)
    if (turn := ready_turn(previous, status)) is not None:
        backend.record_event(stored, *turn)
    return min(plan.look_again_s, RETRY_S if failure else float("inf"))
