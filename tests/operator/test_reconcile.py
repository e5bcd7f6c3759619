"""The story function over a backend in memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_operator.observe import Observed, ObservedWorkload, SwitchableEngine
from mini_infer_operator.plan.plan import Plan
from mini_infer_operator.reconcile import RETRY_S, reconcile
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.status import EventType, PermanentFailure
from tests.support.services import changed


def workload(role: str, revision: str, replicas: int, ready: int) -> ObservedWorkload:
    return ObservedWorkload(role, revision, replicas, ready, ready)


class MemoryBackend:
    """Carries out plans at once; engines become available when `start` is called."""

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.stored = stored
        self.workloads: list[ObservedWorkload] = []
        self.failure: PermanentFailure | None = None
        self.reports = 0
        self.stored_presets: list[dict[str, Any]] = []
        self.kept: dict[str, Any] | None = None
        self.events: list[tuple[str, str, str]] = []

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        assert about["metadata"]["name"] == "demo"
        self.events.append((event_type, reason, message))

    async def read(self) -> Mapping[str, Any] | None:
        return self.stored

    def presets(self) -> list[dict[str, Any]]:
        return self.stored_presets

    def running_spec(self, stored: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self.kept

    async def observe(self, service: InferenceService) -> Observed:
        return Observed(self.workloads)

    async def apply(self, service: InferenceService, plan: Plan) -> PermanentFailure | None:
        if self.failure is None:
            ready = {w.revision: w.ready for w in self.workloads}
            self.workloads = [
                workload(w.role, w.revision, w.replicas, min(w.replicas, ready.get(w.revision, 0)))
                for w in plan.workloads
            ]
        return self.failure

    def url(self, service: InferenceService) -> str:
        return "http://gateway"

    async def report(self, stored: Mapping[str, Any], status: dict[str, Any]) -> None:
        assert self.stored is not None
        if self.stored.get("status") != status:
            self.stored["status"] = status
            self.reports += 1

    def start(self) -> None:
        self.workloads = [workload(w.role, w.revision, w.replicas, w.replicas) for w in self.workloads]

    def ready(self) -> tuple[str, str]:
        assert self.stored is not None
        condition = self.stored["status"]["conditions"][0]
        return condition["status"], condition["reason"]


async def settle(backend: MemoryBackend) -> None:
    for _ in range(40):
        before, reports = backend.workloads, backend.reports
        assert await reconcile(backend) == float("inf")
        if (backend.workloads, backend.reports) == (before, reports):
            return
        backend.start()
    raise AssertionError("it does not settle")


async def test_reconcile_returns_none_when_the_service_is_gone() -> None:
    assert await reconcile(MemoryBackend(None)) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", "c"])), min_size=1, max_size=5))
async def test_reconcile_converges_and_writes_nothing_afterwards(edits: list[tuple[int, str]]) -> None:
    backend = MemoryBackend(changed({}))
    for replicas, image in edits:
        status = (backend.stored or {}).get("status")
        backend.stored = changed({"spec": {"image": image, "unified": {"replicas": replicas}}})
        backend.stored["status"] = status
        await settle(backend)
        assert backend.ready() == ("True", "AllReplicasReady" if replicas else "ScaledToZero")
        assert [w.replicas for w in backend.workloads] == [replicas]
    reports = backend.reports
    assert await reconcile(backend) == float("inf")
    assert backend.reports == reports


async def test_the_first_status_counts_the_engines_that_the_same_pass_creates() -> None:
    backend = MemoryBackend(changed({"spec": {"unified": {"replicas": 2}}}))
    await reconcile(backend)
    assert backend.stored is not None
    assert (backend.stored["status"]["replicas"], backend.stored["status"]["readyReplicas"]) == (2, 0)
    assert backend.ready() == ("False", "Starting")
    await reconcile(backend)
    assert backend.reports == 1


async def test_reconcile_records_events_for_decisions_and_status_changes_only() -> None:
    backend = MemoryBackend(changed({}))
    await settle(backend)
    (revision,) = {w.revision for w in backend.workloads}
    assert backend.events == [
        ("Normal", "RevisionStarted", f"unified revision {revision} starts with 2 engines, image local"),
        ("Normal", "AllReplicasReady", "2 of 2 engines are ready"),
    ]
    backend.events.clear()
    await reconcile(backend)
    assert backend.events == []
    backend.failure = PermanentFailure("Refused", "Deployment demo: exceeded quota")
    await reconcile(backend)
    await reconcile(backend)
    assert backend.events == [("Warning", "Refused", "Deployment demo: exceeded quota")]


async def test_engines_are_left_alone_when_the_spec_is_invalid() -> None:
    backend = MemoryBackend(changed({}))
    await settle(backend)
    running, status = backend.workloads, (backend.stored or {})["status"]
    backend.stored = changed({"spec": {"unified": {"replicas": "two"}}}) | {"status": status}
    assert await reconcile(backend) == float("inf")
    assert backend.ready() == ("False", "InvalidSpec")
    assert "spec.unified.replicas" in backend.stored["status"]["conditions"][0]["message"]
    assert backend.workloads == running


async def test_last_revision_is_scaled_when_the_preset_that_it_names_is_gone() -> None:
    preset = {"metadata": {"name": "p", "uid": "1", "generation": 1}, "spec": {"engine": {"maxNumSeqs": 5}}}
    backend = MemoryBackend(changed({"metadata": {"generation": 1}, "spec": {"preset": "p"}}))
    backend.stored_presets = [preset]
    await reconcile(backend)
    assert backend.stored is not None
    before = backend.stored["status"]
    backend.stored_presets = []
    await reconcile(backend)
    assert backend.ready() == ("False", "PresetNotFound")
    assert [one.replicas for one in backend.workloads] == [2]

    backend.kept = {**backend.stored["spec"], "preset": "none", "unified": {"replicas": 3, "engine": {"maxNumSeqs": 5}}}
    await reconcile(backend)
    (workload,) = backend.workloads
    assert (workload.replicas, workload.revision) == (3, before["revision"])
    assert backend.stored["status"]["preset"] == before["preset"]
    assert backend.ready() == ("False", "PresetNotFound")
    await reconcile(backend)
    reports = backend.reports
    assert await reconcile(backend) == RETRY_S
    assert backend.reports == reports


async def test_reconcile_reports_and_retries_when_a_failure_is_permanent() -> None:
    backend = MemoryBackend(changed({}))
    backend.failure = PermanentFailure("Refused", "Deployment demo: exceeded quota")
    assert await reconcile(backend) == RETRY_S
    assert backend.ready() == ("False", "Refused")
    backend.failure = None
    await settle(backend)
    assert backend.ready() == ("True", "AllReplicasReady")


async def test_service_stays_ready_when_an_engine_switches_its_role() -> None:
    class Switching(MemoryBackend):
        async def observe(self, service: InferenceService) -> Observed:
            observed = await super().observe(service)
            if not observed.workloads:
                return observed
            revision = observed.workloads[0].revision
            return replace(observed, switchable=[SwitchableEngine("d", "decode", revision, ready=True)])

    role = {"scaling": {"minReplicas": 1, "maxReplicas": 3}}
    roles = {"prefill": {"replicas": 1, **role}, "decode": {"replicas": 2, **role}}
    backend = Switching(changed({"spec": {"unified": None, **roles}}))
    await settle(backend)
    assert backend.ready() == ("True", "AllReplicasReady")
    assert backend.stored is not None
    backend.stored = changed({"spec": {"prefill": {"replicas": 2}, "decode": {"replicas": 1}}}, backend.stored)
    backend.events.clear()
    await reconcile(backend)
    assert backend.ready() == ("True", "AllReplicasReady")
    assert [reason for _, reason, _ in backend.events] == ["RoleSwitched"]
    assert {role["name"]: role["ready"] for role in backend.stored["status"]["roles"]} == {
        "prefill": "2/2",
        "decode": "1/1",
    }
