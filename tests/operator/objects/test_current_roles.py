"""Pods whose engines have switched, and the Deployments that made them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from mini_infer_operator.objects.current_roles import (
    by_deployment,
    current_role,
    past_switches,
    switchable_engines,
)
from mini_infer_operator.observe import ObservedEngine, ObservedWorkload
from mini_infer_operator.plan.plan import Workload
from mini_infer_operator.plan.role_switches import RoleSwitch, with_switches
from mini_infer_operator.resource import LABEL_CURRENT_ROLE, LABEL_REVISION, LABEL_ROLE

R = "r1"


def pod(name: str, role: str, current: str | None = None, *, ready: bool = True) -> dict[str, Any]:
    labels = {LABEL_ROLE: role, LABEL_REVISION: R} | ({LABEL_CURRENT_ROLE: current} if current else {})
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": {"conditions": conditions}}


def deployed(prefill: int, decode: int) -> list[ObservedWorkload]:
    """Names engines p0, p1, ... and d0, d1, ..., the youngest last."""
    made = []
    for role, count in {"prefill": prefill, "decode": decode}.items():
        engines = [
            ObservedEngine(f"{role[0]}{i}", ready=True, created=datetime(2026, 1, 1, i, tzinfo=UTC), started_as=role)
            for i in range(count)
        ]
        made.append(ObservedWorkload(role, R, count, count, count, engines=engines))
    return made


@pytest.mark.parametrize(
    ("labelled", "expected"),
    [(None, "prefill"), ("decode", "decode"), ("prefill", "prefill"), ("king", "prefill"), ("", "prefill")],
)
def test_role_is_that_of_the_label_when_it_names_one(labelled: str | None, expected: str) -> None:
    assert current_role(pod("p", "prefill", labelled)) == expected


def test_switches_of_the_past_are_those_of_labels() -> None:
    leaving = pod("x", "prefill", "decode")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pods = [pod("a", "prefill"), pod("b", "prefill", "decode"), pod("c", "decode", "decode"), leaving]
    assert past_switches(pods) == [RoleSwitch("b", R, "prefill", "decode")]
    found = switchable_engines(pods, {"b": 2.0}, frozenset({"a"}))
    assert [(one.name, one.role, one.load) for one in found] == [("b", "decode", 2.0), ("c", "decode", 0.0)]


P1_DECODES = [RoleSwitch("p1", R, "prefill", "decode")]
P0_DECODES = [RoleSwitch("p0", R, "prefill", "decode")]


@pytest.mark.parametrize(
    ("exist", "switched", "planned", "expected"),
    [
        pytest.param((2, 1), [], (3, 1), (3, 1), id="nothing has switched: as planned"),
        pytest.param((2, 1), P0_DECODES, (1, 2), (2, 1), id="nothing changes"),
        pytest.param((2, 1), P0_DECODES, (1, 3), (2, 2), id="a new decode engine is a decode pod"),
        pytest.param((2, 1), P0_DECODES, (2, 2), (3, 1), id="a new prefill engine is a prefill pod"),
        pytest.param((2, 2), P0_DECODES, (1, 2), (2, 1), id="the youngest decode engine goes, a decode pod"),
        pytest.param((2, 1), P1_DECODES, (1, 1), (1, 1), id="the youngest decode engine goes, a prefill pod"),
        pytest.param((2, 1), P0_DECODES, (0, 0), (0, 0), id="to zero"),
    ],
)
def test_deployments_have_the_pods_that_planned_roles_need(
    exist: tuple[int, int], switched: list[RoleSwitch], planned: tuple[int, int], expected: tuple[int, int]
) -> None:
    raw = deployed(*exist)
    plan = [Workload(role, R, count, None) for role, count in zip(("prefill", "decode"), planned, strict=True)]
    found = {w.role: w.replicas for w in by_deployment(plan, raw, with_switches(raw, switched))}
    assert (found["prefill"], found["decode"]) == expected


def test_old_revision_leaves_no_deployment_behind_when_it_is_not_planned() -> None:
    raw = deployed(2, 1)
    assert by_deployment([], raw, with_switches(raw, P0_DECODES)) == []


def test_deployment_is_never_negative_when_pods_are_missing() -> None:
    (prefill, decode) = deployed(1, 1)
    lost = ObservedWorkload("prefill", R, 0, 0, 0)  # scaled to none while its pod, which has switched, still ends
    seen = with_switches([prefill, decode], P0_DECODES)
    found = by_deployment([Workload("decode", R, 0, None)], [lost, decode], seen)
    assert all(workload.replicas >= 0 for workload in found)
