"""Engines that change their role instead of others that start, as tables."""

from datetime import UTC, datetime
from typing import Any

import pytest

from mini_infer_operator.launch import service_revision
from mini_infer_operator.observe import Observed, ObservedWorkload, SwitchableEngine
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.decisions import decisions
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.plan.role_switches import RoleSwitch, roles_are_interchangeable, with_switches
from mini_infer_operator.resource import InferenceService
from tests.support.services import changed

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SCALING = {"minReplicas": 1, "maxReplicas": 8}


def pair(prefill: int = 2, decode: int = 2, change: dict[str, Any] | None = None) -> InferenceService:
    roles = {"prefill": {"replicas": prefill, "scaling": SCALING}, "decode": {"replicas": decode, "scaling": SCALING}}
    return parse_service(changed({"spec": change or {}}, changed({"spec": {"unified": None, **roles}})))


REVISION = service_revision(pair(), "local")


def seen(prefill: int, decode: int, revision: str = REVISION) -> list[ObservedWorkload]:
    counts = {"prefill": prefill, "decode": decode}
    return [ObservedWorkload(role, revision, count, count, count) for role, count in counts.items()]


def engine(
    name: str, role: str, load: float = 0.0, *, ready: bool = True, revision: str = REVISION
) -> SwitchableEngine:
    return SwitchableEngine(name, role, revision, ready, load)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, True, id="both planned and alike"),
        pytest.param({"prefill": {"scaling": {"targets": {"ttftMs": 100}}}}, True, id="other targets"),
        pytest.param({"prefill": {"scaling": None}}, False, id="one is not scaled"),
        pytest.param({"decode": {"scaling": {"owner": "Autoscaler"}}}, False, id="an autoscaler owns one"),
        pytest.param({"decode": {"engine": {"maxNumSeqs": 8}}}, False, id="other options"),
        pytest.param({"decode": {"resources": {"limits": {"cpu": 1}}}}, False, id="other resources"),
        pytest.param({"decode": {"template": {"metadata": {"labels": {"a": "b"}}}}}, False, id="another template"),
        pytest.param({"prefill": None, "decode": None, "unified": {"scaling": SCALING}}, False, id="one role"),
    ],
)
def test_roles_are_interchangeable_when_both_are_planned_and_start_alike(
    change: dict[str, Any], *, expected: bool
) -> None:
    assert roles_are_interchangeable(pair(change=change)) is expected


IDLE, BUSY, STARTING = (
    engine("d-idle", "decode"),
    engine("d-busy", "decode", 9.0),
    engine("d-new", "decode", ready=False),
)
P_IDLE = engine("p-idle", "prefill")
OLD = engine("d-old", "decode", revision="old")


@pytest.mark.parametrize(
    ("wanted", "exist", "engines", "expected", "replicas"),
    [
        pytest.param((2, 2), (2, 2), [IDLE, BUSY], [], (2, 2), id="nothing to do"),
        pytest.param((3, 1), (2, 2), [BUSY, IDLE], ["d-idle"], (3, 1), id="the idle one, and none starts"),
        pytest.param((3, 1), (2, 2), [STARTING, BUSY], ["d-busy"], (3, 1), id="ready before starting"),
        pytest.param((3, 1), (2, 2), [STARTING], ["d-new"], (3, 1), id="starting before none"),
        pytest.param((1, 3), (2, 2), [P_IDLE, IDLE], ["p-idle"], (1, 3), id="the other way"),
        pytest.param((5, 1), (2, 2), [IDLE, BUSY], ["d-idle"], (5, 1), id="one switches and two start"),
        pytest.param((3, 3), (2, 2), [IDLE, BUSY], [], (3, 3), id="both lack engines"),
        pytest.param((3, 1), (2, 2), [OLD], [], (3, 2), id="of another revision: it starts, the other drains later"),
        pytest.param((3, 1), (2, 2), [], [], (3, 1), id="roles that may not switch"),
    ],
)
def test_role_gets_engines_of_the_other_before_one_starts(
    wanted: tuple[int, int],
    exist: tuple[int, int],
    engines: list[SwitchableEngine],
    expected: list[str],
    replicas: tuple[int, int],
) -> None:
    service, observed = pair(*wanted), Observed(seen(*exist), switchable=engines)
    plan = make_plan(service, observed, NOW)
    assert [switch.name for switch in plan.switches] == expected
    found = {workload.role: workload.replicas for workload in plan.workloads}
    assert found["prefill"] == replicas[0]
    assert plan.draining == frozenset()
    assert [d.message.split()[1] for d in decisions(observed, plan) if d.reason == "RoleSwitched"] == expected


def test_plan_switches_nothing_more_when_it_is_made_again() -> None:
    service, observed = pair(3, 1), Observed(seen(2, 2), switchable=[IDLE, BUSY])
    first = make_plan(service, observed, NOW)
    switched = [engine("d-idle", "prefill"), BUSY]
    again = make_plan(service, Observed(with_switches(observed.workloads, first.switches), switchable=switched), NOW)
    assert again.switches == []
    assert {w.role: w.replicas for w in again.workloads} == {"prefill": 3, "decode": 1}


def test_counts_follow_a_switch_and_its_way_back() -> None:
    there = RoleSwitch("d", REVISION, "decode", "prefill")
    back = RoleSwitch("d", REVISION, "prefill", "decode")
    assert [w.available for w in with_switches(seen(1, 2), [there])] == [2, 1]
    assert [w.available for w in with_switches(seen(1, 2), [there, back])] == [1, 2]
    assert [w.replicas for w in with_switches(seen(1, 0), [there])] == [1, 0], "an engine that is counted nowhere"
