import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_operator.plan.rollout import Count, Limits, RoleState, next_replicas_of_roles

DEFAULT = Limits(surge=1, unavailable=0)


def next_replicas(desired: int, revision: str, seen: dict[str, Count], limits: Limits) -> dict[str, int]:
    """Of a service of one role."""
    return next_replicas_of_roles(revision, {"unified": RoleState(desired, seen, limits)})["unified"]


@pytest.mark.parametrize(
    ("desired", "seen", "expected"),
    [
        pytest.param(2, {}, {"new": 2}, id="first start"),
        pytest.param(0, {}, {"new": 0}, id="none asked for"),
        pytest.param(2, {"old": Count(2, 2)}, {"new": 1, "old": 2}, id="one new beside all old"),
        pytest.param(2, {"old": Count(2, 2), "new": Count(1, 0)}, {"new": 1, "old": 2}, id="new one not ready: wait"),
        pytest.param(
            2, {"old": Count(2, 2), "new": Count(1, 1)}, {"new": 2, "old": 1}, id="new one available: an old goes"
        ),
        pytest.param(2, {"old": Count(1, 1), "new": Count(2, 2)}, {"new": 2}, id="old revision removed"),
        pytest.param(3, {"old": Count(2, 2)}, {"new": 2, "old": 2}, id="edit and scale up together"),
        pytest.param(1, {"old": Count(3, 3)}, {"new": 1, "old": 1}, id="edit and scale down together"),
        pytest.param(0, {"old": Count(2, 2)}, {"new": 0}, id="scaled to zero"),
        pytest.param(
            2, {"a": Count(1, 1), "b": Count(2, 2)}, {"new": 1, "b": 2}, id="of two old revisions the larger serves on"
        ),
        pytest.param(2, {"old": Count(2, 0, worked=False)}, {"new": 2}, id="old ones that never worked go at once"),
        pytest.param(
            2, {"old": Count(2, 0), "new": Count(1, 0)}, {"new": 1, "old": 2}, id="a moment's unreadiness costs nothing"
        ),
        pytest.param(
            2, {"old": Count(2, 0), "new": Count(1, 1)}, {"new": 2, "old": 1}, id="new ones stand in for unready ones"
        ),
        pytest.param(
            2,
            {"old": Count(2, 0, expired=True), "new": Count(1, 0)},
            {"new": 2, "old": 1},
            id="past the deadline unready ones go, but one stays until a new one is available",
        ),
        pytest.param(
            2, {"old": Count(2, 1, expired=True)}, {"new": 2, "old": 1}, id="past the deadline what serves stays"
        ),
        pytest.param(
            2,
            {"a": Count(2, 1), "b": Count(2, 1)},
            {"new": 1, "a": 1, "b": 1},
            id="what is available comes before what may recover",
        ),
    ],
)
def test_next_replicas_by_observed_counts(desired: int, seen: dict[str, Count], expected: dict[str, int]) -> None:
    assert next_replicas(desired, "new", seen, DEFAULT) == expected


@pytest.mark.parametrize(
    ("limits", "seen", "expected"),
    [
        pytest.param(Limits(1, 1), {"old": Count(4, 4)}, {"old": 3, "new": 2}, id="one fewer at once"),
        pytest.param(Limits(0, 1), {"old": Count(4, 4)}, {"old": 3, "new": 1}, id="no room above"),
        pytest.param(Limits(0, 1), {"old": Count(3, 3), "new": Count(1, 0)}, {"old": 3, "new": 1}, id="it is spent"),
        pytest.param(Limits(4, 0), {"old": Count(4, 4)}, {"old": 4, "new": 4}, id="all beside all"),
        pytest.param(Limits(1, 1), {"old": Count(4, 3)}, {"old": 3, "new": 2}, id="the unready one goes first"),
    ],
)
def test_rollout_limits_by_spec(limits: Limits, seen: dict[str, Count], expected: dict[str, int]) -> None:
    assert next_replicas(4, "new", seen, limits) == expected


def test_a_lone_engine_is_stopped_first_when_no_gpu_is_free() -> None:
    assert next_replicas(1, "new", {"old": Count(1, 1), "new": Count(1, 0)}, Limits(1, 1)) == {"new": 1}


limits = st.sampled_from([Limits(1, 0), Limits(0, 1), Limits(2, 1), Limits(3, 0)])
events = st.sampled_from(["edit", "edit back", "scale", "ready", "crash", "recovers", "deadline"])
steps = st.lists(st.tuples(events, st.integers(0, 5)), max_size=40)


def changed(event: str, value: int, seen: dict[str, Count]) -> dict[str, Count]:
    if event in {"ready", "recovers"}:
        return {n: Count(c.replicas, min(c.replicas, c.available + value)) for n, c in seen.items()}
    if event == "crash":
        return {n: Count(c.replicas, max(0, c.available - value), c.worked) for n, c in seen.items()}
    if event == "deadline":
        return {n: Count(c.replicas, c.available, c.worked, expired=True) for n, c in seen.items()}
    return seen


@given(limits, steps)
def test_rollout_never_removes_engines_below_min_available(limits: Limits, events: list[tuple[str, int]]) -> None:
    """Any sequence of edits, scalings, starts, crashes and recoveries, with the plan carried out after each."""
    desired, revision, before_edit = 2, "r0", "r0"
    seen: dict[str, Count] = {}
    for number, (event, value) in enumerate(events):
        if event == "edit":
            before_edit, revision = revision, f"r{number}"
        elif event == "edit back":
            before_edit, revision = revision, before_edit
        elif event == "scale":
            desired = value
        seen = changed(event, value, seen)
        requested = next_replicas(desired, revision, seen, limits)
        available = sum(count.available for count in seen.values())
        might_serve = sum(c.hopeful for name, c in seen.items() if name != revision)
        # A Deployment that shrinks removes engines that cannot answer first.
        after = {
            name: Count(n, min(n, seen[name].available), seen[name].worked) if name in seen else Count(n, 0)
            for name, n in requested.items()
        }
        assert sum(count.available for count in after.values()) >= min(desired - limits.unavailable, available)
        old_left = sum(n for name, n in requested.items() if name != revision)
        covered = min(desired, seen.get(revision, Count(0, 0)).available)
        assert old_left >= min(might_serve, desired - limits.unavailable - covered), "what may recover was taken away"
        assert sum(requested.values()) <= desired + limits.surge
        assert all(n >= 0 for n in requested.values())
        assert list(requested)[-1] == revision, "what grows is carried out last"
        seen = after


@given(st.integers(0, 8), st.integers(0, 8), limits)
def test_rollout_converges_to_the_desired_replicas(desired: int, old: int, limits: Limits) -> None:
    seen = {"old": Count(old, old)}
    for _ in range(2 * desired + 3):
        seen = {name: Count(n, n) for name, n in next_replicas(desired, "new", seen, limits).items()}
    assert seen == {"new": Count(desired, desired)}
    assert next_replicas(desired, "new", seen, limits) == {"new": desired}


@given(st.integers(1, 8), st.integers(0, 8))
def test_old_engines_stay_when_new_ones_crash_before_they_are_available(desired: int, crashes: int) -> None:
    """New engines that are never available for long enough take nothing away, however often they look ready."""
    seen = {"old": Count(desired, desired)}
    for _ in range(crashes):
        requested = next_replicas(desired, "new", seen, DEFAULT)
        seen = {"old": Count(requested["old"], requested["old"]), "new": Count(requested["new"], 0, worked=False)}
        assert requested["old"] == desired
