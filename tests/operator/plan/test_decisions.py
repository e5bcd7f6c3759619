from datetime import UTC, datetime

import pytest

from mini_infer_operator.launch import service_revision
from mini_infer_operator.observe import Observed, ObservedWorkload
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.decisions import decisions
from mini_infer_operator.plan.plan import Plan, Workload, make_plan
from tests.support.services import changed

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def planned(*workloads: tuple[str, int]) -> Plan:
    return Plan([Workload("unified", revision, n, None) for revision, n in workloads])


def seen(*workloads: tuple[str, int]) -> Observed:
    return Observed([ObservedWorkload("unified", revision, n, n, n) for revision, n in workloads])


@pytest.mark.parametrize(
    ("before", "after", "reported"),
    [
        ((("a", 2),), (("a", 2),), []),
        ((), (("a", 1),), ["RevisionStarted: unified revision a starts with 1 engine"]),
        ((("a", 1),), (("a", 3),), ["ScaledUp: unified revision a goes from 1 to 3 engines"]),
        ((("a", 3),), (("a", 0),), ["ScaledDown: unified revision a goes from 3 to 0 engines"]),
        (
            (("a", 1), ("b", 2)),
            (("b", 2),),
            ["RevisionRemoved: unified revision a is removed, with 1 engine"],
        ),
    ],
)
def test_events_by_change_of_the_plan(
    before: tuple[tuple[str, int], ...], after: tuple[tuple[str, int], ...], reported: list[str]
) -> None:
    assert [f"{d.reason}: {d.message}" for d in decisions(seen(*before), planned(*after))] == reported


def test_the_event_of_a_new_revision_names_its_image() -> None:
    service = parse_service(changed({}))
    (decision,) = decisions(Observed(), make_plan(service, Observed(default_image="engine:1"), NOW))
    assert decision.message.endswith("starts with 2 engines, image engine:1")
    assert service_revision(service, "engine:1") in decision.message
