"""The operator in one function: read, observe, plan, apply, report. Places (a cluster, this machine) do the effects."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from mini_infer_contract.resources import InferenceService
from mini_infer_operator.parse import InvalidServiceError, parse_service
from mini_infer_operator.plan import Observed, Plan, make_plan
from mini_infer_operator.status import Problem, invalid_status, service_status

UNSETTLED_S = 5.0
"""Look again this soon while engines come and go: why a pod does not start is read here, not watched."""


class Place(Protocol):
    """Where engines run. Errors that pass by themselves are raised; those that a user must solve are Problems."""

    default_image: str

    async def read(self) -> Mapping[str, Any] | None:
        """The InferenceService as stored; None once it is gone or going."""

    async def observe(self, service: InferenceService) -> Observed:
        """What runs for it now."""

    async def apply(self, service: InferenceService, plan: Plan) -> Problem | None:
        """Bring the plan about, as far as one step goes."""

    def url(self, service: InferenceService) -> str | None:
        """Where clients find it."""

    async def report(self, stored: Mapping[str, Any], status: dict[str, Any]) -> None:
        """Tell the user, if it is news."""


async def reconcile(place: Place) -> float | None:
    """Bring one service one step closer to its spec, whatever happened before. Seconds until the next look, at most.

    None: the service is gone, and what belonged to it goes by itself (owner references).
    """
    stored = await place.read()
    if stored is None:
        return None
    now, previous = datetime.now(UTC), stored.get("status") or {}
    try:
        service = parse_service(stored)
    except InvalidServiceError as error:
        generation = stored["metadata"].get("generation", 0)
        await place.report(stored, invalid_status(generation, str(error), previous=previous, now=now))
        return float("inf")

    observed = await place.observe(service)
    plan = make_plan(service, observed, place.default_image)
    problem = await place.apply(service, plan)
    status = service_status(service, observed, plan, problem, url=place.url(service), previous=previous, now=now)
    await place.report(stored, status)
    ready = next(condition for condition in status["conditions"] if condition["type"] == "Progressing")
    return UNSETTLED_S if problem or ready["status"] == "True" else float("inf")
