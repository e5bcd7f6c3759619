from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_operator.observe import ObservedEngine, ObservedWorkload
from mini_infer_operator.plan.drain import UNKNOWN_AFTER, UNROUTED_AFTER, drain, may_go, victims

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def engine(
    name: str, age: int = 60, *, ready: bool = True, draining: timedelta | None = None, running: int | None = None
) -> ObservedEngine:
    since = None if draining is None else NOW - draining
    return ObservedEngine(name, ready, NOW - timedelta(seconds=age), since, running)


def workload(revision: str, *engines: ObservedEngine) -> ObservedWorkload:
    ready = sum(e.ready for e in engines)
    return ObservedWorkload("unified", revision, len(engines), ready, ready, engines=engines)


def test_drain_victims_are_unready_then_draining_then_youngest_engines() -> None:
    engines = [
        engine("old", 900),
        engine("young", 10),
        engine("chosen", 800, draining=timedelta(1)),
        engine("down", 990, ready=False),
    ]
    assert [e.name for e in victims(workload("a", *engines), 0)] == ["down", "chosen", "young", "old"]
    assert [e.name for e in victims(workload("a", *engines), 3)] == ["down"]
    assert victims(workload("a", *engines), 4) == []


def test_drain_victims_are_the_highest_indexes_of_groups() -> None:
    groups = [replace(engine(name, ready=name != "0"), index=int(name)) for name in ("2", "0", "1")]
    seen = replace(workload("a", *groups), available_by_index=(False, True, True))
    assert [e.name for e in victims(seen, 1)] == ["2", "1"]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (engine("a", ready=False), True),
        (engine("a"), False),
        (engine("a", draining=timedelta(0), running=0), False),
        (engine("a", draining=UNROUTED_AFTER, running=0), True),
        (engine("a", draining=timedelta(seconds=60), running=3), False),
        (engine("a", draining=timedelta(seconds=300), running=3), True),
        (engine("a", draining=UNROUTED_AFTER), False),
        (engine("a", draining=UNKNOWN_AFTER), True),
    ],
    ids=["cannot answer", "not told", "just told", "idle", "busy", "time is over", "says nothing", "said nothing"],
)
def test_when_an_engine_may_go(one: ObservedEngine, expected: bool) -> None:
    assert may_go(one, NOW) is expected


def test_scale_down_waits_for_draining_and_scale_up_for_free_room() -> None:
    old = workload("old", engine("a", 900), engine("b", 800))
    new = workload("new", engine("c"))
    desired = {"old": 1, "new": 2}
    first = drain(desired, "new", {"old": old, "new": new}, 3, NOW)
    assert dict(first.replicas) == {"old": 2, "new": 1}
    assert first.going == {"b"}
    done = workload("old", engine("a", 900), engine("b", 800, draining=UNROUTED_AFTER, running=0))
    second = drain(desired, "new", {"old": done, "new": new}, 3, NOW)
    assert dict(second.replicas) == {"old": 1, "new": 2}
    assert second.going == {"b"}


def test_a_revision_is_drained_before_it_is_removed() -> None:
    old, new = workload("old", engine("a")), workload("new", engine("b"), engine("c"))
    assert dict(drain({"new": 2}, "new", {"old": old, "new": new}, 3, NOW).replicas) == {"old": 1, "new": 2}
    idle = workload("old", engine("a", draining=UNROUTED_AFTER, running=0))
    assert dict(drain({"new": 2}, "new", {"old": idle, "new": new}, 3, NOW).replicas) == {"new": 2}


def test_no_engine_is_a_victim_when_it_is_needed_again() -> None:
    seen = {"new": workload("new", engine("a", draining=timedelta(seconds=1), running=5), engine("b"))}
    assert drain({"new": 2}, "new", seen, 3, NOW).going == frozenset()


def test_nothing_drains_when_engines_are_not_listed() -> None:
    seen = {"old": ObservedWorkload("unified", "old", 2, 2, 2), "new": ObservedWorkload("unified", "new", 1, 1, 1)}
    assert dict(drain({"old": 1, "new": 2}, "new", seen, 3, NOW).replicas) == {"old": 1, "new": 2}


engines = st.builds(
    engine,
    st.uuids().map(str),
    st.integers(0, 999),
    ready=st.booleans(),
    draining=st.none() | st.integers(0, 400).map(lambda seconds: timedelta(seconds=seconds)),
    running=st.none() | st.integers(0, 3),
)


@given(st.lists(engines, max_size=5), st.lists(engines, max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_drain_respects_the_surge_limit_and_keeps_busy_engines(
    old: list[ObservedEngine], new: list[ObservedEngine], keep: int, grow: int
) -> None:
    seen = {"old": workload("old", *old), "new": workload("new", *new)}
    keep = min(keep, len(old))
    most = keep + grow
    desired = {**({"old": keep} if keep else {}), "new": grow}
    result = drain(desired, "new", seen, most, NOW)
    after = result.replicas
    assert after["new"] <= max(grow, len(new))
    if after["new"] > len(new):
        assert sum(after.values()) <= max(most, len(old) + len(new))
    assert keep <= after.get("old", 0) <= len(old)
    if after.get("old", 0) < len(old):
        assert all(may_go(e, NOW) for e in victims(seen["old"], after.get("old", 0)))
