"""Decisions on a canary as stories over plans: engines get ready at once, and the status alone is remembered."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from mini_infer_operator.canary.decide import decide_canary
from mini_infer_operator.canary.state import CanaryState, read_canary
from mini_infer_operator.launch import service_revision
from mini_infer_operator.observe import Observed, ObservedCanary, ObservedEngine, ObservedWorkload, RevisionWindow
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.status import service_status
from tests.support.services import changed

START = datetime(2026, 1, 1, tzinfo=UTC)
STEPS = [{"mirror": "10%", "pauseSeconds": 30}, {"weight": "5%", "pauseSeconds": 30}, {"weight": "50%"}]
GOOD = RevisionWindow(requests=100, replays=10, divergence_sum=0.1)


def document(tokens: int, replicas: int = 4, **canary: Any) -> dict[str, Any]:
    """Another number of tokens is another revision."""
    role = {"replicas": replicas, "engine": {"maxModelLen": tokens}}
    rollout = {"canary": {"steps": STEPS} | canary, "minReadySeconds": 0, "progressDeadlineSeconds": 600}
    return changed({"spec": {"unified": role, "rollout": rollout}})


@dataclass
class World:
    """A service whose plans are carried out at once."""

    spec: dict[str, Any]
    now: datetime = START
    workloads: list[ObservedWorkload] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    seen: ObservedCanary = field(default_factory=lambda: ObservedCanary(GOOD, GOOD, is_reported=True))
    starts: bool = True
    """False: new engines do not become available."""
    states: list[CanaryState | None] = field(default_factory=list)

    @property
    def revision(self) -> str:
        return service_revision(parse_service(self.spec), "local")

    @property
    def canary(self) -> CanaryState:
        state = self.states[-1]
        assert state is not None
        return state

    @property
    def engines(self) -> dict[str, int]:
        return {w.revision: w.replicas for w in self.workloads if w.replicas}

    def step(self, seconds: float = 2.0) -> None:
        """One pass of the operator, and what engines do until the next."""
        self.now += timedelta(seconds=seconds)
        service = parse_service(self.spec)
        before = read_canary(self.status)
        about = ("", 0) if before is None else (before.revision, before.step)
        seen = replace(self.seen, revision=about[0], step=about[1])
        observed = Observed(self.workloads, canary=seen)
        canary = decide_canary(service, observed, self.status, self.now)
        plan = make_plan(service, observed, self.now, canary)
        self.status = service_status(
            service, observed, plan, None, url=None, previous=self.status, now=self.now, canary=canary
        )
        self.states.append(canary)
        old = {(w.role, w.revision): w for w in self.workloads}
        self.workloads = [self._carried_out(w.role, w.revision, w.replicas, old) for w in plan.workloads]

    def _carried_out(
        self, role: str, revision: str, replicas: int, before: dict[tuple[str, str], ObservedWorkload]
    ) -> ObservedWorkload:
        old = before.get((role, revision))
        available = replicas if self.starts or revision != self.revision else min(replicas, old.available if old else 0)
        progressed = old.progressed_at if old and old.available >= available else self.now
        known = old or ObservedWorkload(role, revision, 0, 0, 0)
        engines = [ObservedEngine(f"{revision}-{n}", ready=False, created=START) for n in range(replicas)]
        return replace(
            known, replicas=replicas, ready=available, available=available, progressed_at=progressed, engines=engines
        )

    def until_settled(self) -> None:
        for _ in range(8):
            self.step()

    def condition(self, kind: str) -> dict[str, Any]:
        return next(dict(c) for c in self.status["conditions"] if c["type"] == kind)

    def edit(self, tokens: int, **canary: Any) -> None:
        self.spec = document(tokens, **canary)


def serving() -> World:
    """Four engines of the first revision."""
    world = World(document(1024))
    world.until_settled()
    assert (world.engines, world.states[-1]) == ({world.revision: 4}, None)
    return world


def test_the_first_revision_is_not_judged() -> None:
    assert serving().condition("Ready")["status"] == "True"


def test_a_good_revision_gets_more_at_each_step_and_is_promoted() -> None:
    world = serving()
    old, _ = world.revision, world.edit(2048)
    new = world.revision
    world.step()
    assert (world.canary.announced, world.engines) == (False, {old: 4}), "gateways know before engines start"
    world.step()
    assert world.engines == {old: 4, new: 1}
    shares: list[tuple[int, int]] = []
    while world.canary.is_running:
        world.step()
        if not shares or shares[-1] != (world.canary.mirror, world.canary.weight):
            shares.append((world.canary.mirror, world.canary.weight))
        assert world.engines.get(old, 0) >= 3 or not world.canary.is_running
        assert sum(world.engines.values()) <= 5, "a canary keeps the surge"
    assert shares == [(10, 0), (0, 5), (0, 50), (0, 100)]
    assert (world.canary.phase, world.canary.reason) == ("Promoted", "AnalysisPassed")
    world.until_settled()
    assert world.engines == {new: 4}
    assert world.condition("Ready")["status"] == "True"
    assert world.status["canary"]["phase"] == "Promoted"


def test_steps_last_as_long_as_they_say() -> None:
    world = serving()
    world.edit(2048)
    began = {}
    while not world.states[-1] or world.canary.is_running:
        world.step(1.0)
        began.setdefault((world.canary.phase, world.canary.step), world.now)
    times = list(began.values())
    waits = [(after - before).total_seconds() for before, after in pairwise(times)]
    assert waits[0] >= 30
    assert 30 <= waits[1] <= 40
    assert 60 <= waits[2] <= 70


def rolled_back(world: World, new: str, old: str) -> None:
    assert (world.canary.phase, world.canary.stable) == ("RolledBack", old)
    world.until_settled()
    assert world.engines == {old: 4}
    assert {kind: world.condition(kind)["reason"] for kind in ("Ready", "Progressing", "Stalled")} == dict.fromkeys(
        ("Ready", "Progressing", "Stalled"), "CanaryRolledBack"
    )
    assert world.condition("Available")["status"] == "True"
    assert world.status["revision"] == new
    assert world.canary.message in world.condition("Ready")["message"]


@pytest.mark.parametrize("weight", [10, 5, 50])
@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (RevisionWindow(requests=40, errors=20), "Errors"),
        (RevisionWindow(replays=6, divergence_sum=30.0), "Answers"),
        (RevisionWindow(memory_growth_bytes=1 << 30), "MemoryGrowth"),
    ],
)
def test_a_bad_revision_is_rolled_back_when_it_breaks_a_limit(weight: int, seen: RevisionWindow, reason: str) -> None:
    world = serving()
    old, _ = world.revision, world.edit(2048)
    while not world.states[-1] or weight not in (world.canary.weight, world.canary.mirror):
        world.step()
    world.seen = ObservedCanary(seen, GOOD, is_reported=True)
    world.step()
    assert world.canary.reason == reason
    rolled_back(world, world.revision, old)


def test_figures_of_another_canary_are_not_judged() -> None:
    world = serving()
    world.edit(2048)
    for _ in range(4):
        world.step()
    bad = ObservedCanary(RevisionWindow(requests=9, errors=9), GOOD, is_reported=True, revision="another")
    observed = Observed(world.workloads, canary=bad)
    decided = decide_canary(parse_service(world.spec), observed, world.status, world.now)
    assert decided is not None
    assert decided.is_running


def test_a_crashing_engine_rolls_its_revision_back_when_no_gateway_reports() -> None:
    world = serving()
    old, _ = world.revision, world.edit(2048)
    world.seen = ObservedCanary()
    for _ in range(4):
        world.step()
    world.workloads = [
        replace(w, restarts=1, last_end="pod x: OOMKilled") if w.revision == world.revision else w
        for w in world.workloads
    ]
    world.step()
    assert world.canary.reason == "EngineRestarted"
    rolled_back(world, world.revision, old)


def test_a_revision_is_rolled_back_when_its_engines_do_not_get_ready_by_the_deadline() -> None:
    world = serving()
    old, _ = world.revision, world.edit(2048)
    world.starts = False
    for _ in range(40):
        world.step(10.0)
    assert world.canary.is_running
    while world.canary.is_running:
        world.step(10.0)
    assert world.canary.reason == "NoProgress"
    assert 600 <= (world.now - START).total_seconds() <= 700
    rolled_back(world, world.revision, old)


def test_a_rollback_stays_when_the_operator_restarts_and_lapses_when_the_spec_changes() -> None:
    world = serving()
    first, _ = world.revision, world.edit(2048)
    for _ in range(4):
        world.step()
    world.seen = ObservedCanary(RevisionWindow(requests=9, errors=9), GOOD, is_reported=True)
    world.step()
    rolled_back(world, world.revision, first)
    world.seen = ObservedCanary()  # a new operator remembers nothing
    for _ in range(100):
        world.step(30.0)
    assert world.engines == {first: 4}
    world.edit(4096)
    world.seen = ObservedCanary(GOOD, GOOD, is_reported=True)
    world.step()
    assert (world.canary.revision, world.canary.stable) == (world.revision, first)
    while world.canary.is_running:
        world.step()
    world.until_settled()
    assert world.engines == {world.revision: 4}


def test_another_edit_is_judged_beside_the_revision_that_served_when_it_comes_in_the_middle() -> None:
    world = serving()
    first, _ = world.revision, world.edit(2048)
    for _ in range(4):
        world.step()
    second, _ = world.revision, world.edit(4096)
    world.step()
    assert world.canary.stable == first
    for _ in range(3):
        world.step()
    assert world.engines == {first: 4, world.revision: 1}
    assert second not in world.engines


def test_the_old_revision_serves_at_once_when_the_spec_goes_back_to_it() -> None:
    world = serving()
    first, _ = world.revision, world.edit(2048)
    while not world.states[-1] or world.canary.weight != 50:
        world.step()
    for _ in range(4):
        world.step()
    second = world.revision
    assert world.engines == {first: 3, second: 2}
    world.edit(1024)
    world.step()
    assert (world.canary.phase, world.canary.revision, world.canary.reason) == ("RolledBack", second, "EditedBack")
    world.until_settled()
    assert (world.engines, world.states[-1]) == ({first: 4}, None)
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize(("verb", "phase"), [("promote", "Promoted"), ("abort", "RolledBack")])
def test_an_annotation_decides_when_it_names_the_revision(verb: str, phase: str) -> None:
    world = serving()
    world.edit(2048)
    for _ in range(4):
        world.step()
    annotations = {f"serving.mini-infer.io/{verb}": "another"}
    world.spec = changed({"metadata": {"annotations": annotations}}, world.spec)
    world.step()
    assert world.canary.is_running
    annotations = {f"serving.mini-infer.io/{verb}": world.revision}
    world.spec = changed({"metadata": {"annotations": annotations}}, world.spec)
    world.step()
    assert world.canary.phase == phase


def test_a_revision_that_was_rolled_back_can_be_promoted_by_hand() -> None:
    world = serving()
    world.edit(2048)
    for _ in range(4):
        world.step()
    world.spec = changed({"metadata": {"annotations": {"serving.mini-infer.io/abort": world.revision}}}, world.spec)
    world.until_settled()
    assert world.canary.reason == "Aborted"
    world.spec = changed({"metadata": {"annotations": {"serving.mini-infer.io/promote": world.revision}}}, world.spec)
    world.until_settled()
    assert world.engines == {world.revision: 4}


def test_a_canary_stays_at_its_step_when_it_is_paused_and_is_rolled_back_all_the_same() -> None:
    world = serving()
    world.edit(2048)
    world.spec = changed({"spec": {"rollout": {"paused": True}}}, world.spec)
    for _ in range(50):
        world.step(10.0)
    assert (world.canary.is_running, world.canary.step, world.canary.reason) == (True, 0, "Paused")
    world.seen = ObservedCanary(RevisionWindow(requests=9, errors=9), GOOD, is_reported=True)
    world.step()
    assert world.canary.is_rolled_back


@pytest.mark.parametrize(
    ("seen", "reason", "waits_s"),
    [
        (ObservedCanary(), "NoGatewayReports", None),
        (ObservedCanary(RevisionWindow(requests=3, replays=9), GOOD, is_reported=True), "FewRequests", 600),
    ],
)
def test_a_step_waits_when_there_is_nothing_to_judge(seen: ObservedCanary, reason: str, waits_s: int | None) -> None:
    world = serving()
    world.edit(2048)
    world.seen = seen
    for _ in range(20):
        world.step(10.0)
    assert (world.canary.step, world.canary.reason) == (0, reason)
    for _ in range(60):
        world.step(10.0)
    assert (world.canary.step > 0) == (waits_s is not None), "few requests hold a revision up for the deadline only"


def test_the_last_step_waits_for_compared_answers() -> None:
    world = serving()
    world.edit(2048)
    world.seen = ObservedCanary(RevisionWindow(requests=100), GOOD, is_reported=True)
    for _ in range(40):
        world.step(10.0)
    assert (world.canary.step, world.canary.reason) == (2, "FewAnswers")
    world.seen = ObservedCanary(GOOD, GOOD, is_reported=True)
    world.step()
    assert world.canary.phase == "Promoted"


def test_a_single_engine_stays_beside_its_canary() -> None:
    world = World(document(1024, replicas=1))
    world.until_settled()
    old = world.revision
    world.spec = document(2048, replicas=1)
    for _ in range(5):
        world.step()
    assert world.engines == {old: 1, world.revision: 1}
    while world.canary.is_running:
        world.step()
        assert old in world.engines or not world.canary.is_running
    world.until_settled()
    assert world.engines == {world.revision: 1}


def test_a_new_revision_is_not_judged_when_nothing_of_the_old_one_runs() -> None:
    world = World(document(1024, replicas=0))
    world.until_settled()
    world.spec = document(2048)
    world.until_settled()
    assert (world.engines, world.states[-1]) == ({world.revision: 4}, None)


def test_prefill_and_decode_engines_are_judged_as_one_revision() -> None:
    def roles(tokens: int) -> dict[str, Any]:
        role = {"replicas": 2, "engine": {"maxModelLen": tokens}}
        return changed({"spec": {"unified": None, "prefill": role, "decode": role}}, document(1024))

    world = World(roles(1024))
    world.until_settled()
    old = world.revision
    world.spec = roles(2048)
    for _ in range(5):
        world.step()
    assert sorted((w.role, w.revision == old, w.replicas) for w in world.workloads) == [
        ("decode", False, 1),
        ("decode", True, 2),
        ("prefill", False, 1),
        ("prefill", True, 2),
    ]
    world.seen = ObservedCanary(RevisionWindow(requests=9, errors=9), GOOD, is_reported=True)
    world.until_settled()
    assert sorted((w.role, w.revision == old, w.replicas) for w in world.workloads if w.replicas) == [
        ("decode", True, 2),
        ("prefill", True, 2),
    ]


@pytest.mark.parametrize("stored", [{}, {"canary": None}, {"canary": {"phase": "?"}}, {"canary": 3}])
def test_a_state_that_cannot_be_read_counts_as_none(stored: dict[str, Any]) -> None:
    assert read_canary(stored) is None


def test_a_state_survives_the_status() -> None:
    state = CanaryState("Running", "new", "old", 1, 3, START, 5, 0, True, "Analysing", "m", 7, 1, 3, 0.25, START)
    assert read_canary({"canary": state.status().model_dump(by_alias=True, exclude_none=True)}) == state
