"""The story function over a place in memory."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mini_infer_contract.resources import InferenceService
from mini_infer_operator.plan import Observed, ObservedWorkload, Plan
from mini_infer_operator.reconcile import UNSETTLED_S, reconcile
from mini_infer_operator.status import Problem
from tests.support.services import changed


class MemoryPlace:
    """Carries out plans at once; engines become available when `start` is called."""

    default_image = "engine:1"

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.stored = stored
        self.workloads: list[ObservedWorkload] = []
        self.problem: Problem | None = None
        self.reports = 0

    async def read(self) -> Mapping[str, Any] | None:
        return self.stored

    async def observe(self, service: InferenceService) -> Observed:
        return Observed(self.workloads)

    async def apply(self, service: InferenceService, plan: Plan) -> Problem | None:
        if self.problem is None:
            ready = {w.revision: w.available for w in self.workloads}
            self.workloads = [
                ObservedWorkload(w.role, w.revision, w.replicas, min(w.replicas, ready.get(w.revision, 0)))
                for w in plan.workloads
            ]
        return self.problem

    def url(self, service: InferenceService) -> str:
        return "http://gateway"

    async def report(self, stored: Mapping[str, Any], status: dict[str, Any]) -> None:
        assert self.stored is not None
        if self.stored.get("status") != status:
            self.stored["status"] = status
            self.reports += 1

    def start(self) -> None:
        self.workloads = [ObservedWorkload(w.role, w.revision, w.replicas, w.replicas) for w in self.workloads]

    def ready(self) -> tuple[str, str]:
        assert self.stored is not None
        condition = self.stored["status"]["conditions"][0]
        return condition["status"], condition["reason"]


async def settle(place: MemoryPlace) -> None:
    for _ in range(40):
        if await reconcile(place) == float("inf"):
            return
        place.start()
    raise AssertionError("it does not settle")


async def test_a_service_that_is_gone_needs_nothing() -> None:
    assert await reconcile(MemoryPlace(None)) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", "c"])), min_size=1, max_size=5))
async def test_it_settles_and_then_says_nothing_new(edits: list[tuple[int, str]]) -> None:
    place = MemoryPlace(changed({}))
    for replicas, image in edits:
        status = (place.stored or {}).get("status")
        place.stored = changed({"spec": {"image": image, "unified": {"replicas": replicas}}})
        place.stored["status"] = status
        await settle(place)
        assert place.ready() == (("True", "AllReplicasReady") if replicas else ("False", "ScaledToZero"))
        assert [w.replicas for w in place.workloads] == [replicas]
    reports = place.reports
    assert await reconcile(place) == float("inf")
    assert place.reports == reports


async def test_an_invalid_spec_is_told_and_what_runs_is_left_alone() -> None:
    place = MemoryPlace(changed({}))
    await settle(place)
    running, status = place.workloads, (place.stored or {})["status"]
    place.stored = changed({"spec": {"unified": {"replicas": "two"}}}) | {"status": status}
    assert await reconcile(place) == float("inf")
    assert place.ready() == ("False", "InvalidSpec")
    assert "spec.unified.replicas" in place.stored["status"]["conditions"][0]["message"]
    assert place.workloads == running


async def test_a_problem_is_told_and_tried_again_soon() -> None:
    place = MemoryPlace(changed({}))
    place.problem = Problem("Refused", "Deployment demo: exceeded quota")
    assert await reconcile(place) == UNSETTLED_S
    assert place.ready() == ("False", "Refused")
    place.problem = None
    await settle(place)
    assert place.ready() == ("True", "AllReplicasReady")
