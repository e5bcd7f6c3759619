"""Roles roll in step: whatever happens, what serves goes on serving, pairs stay whole, and it comes to an end."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_operator.plan.rollout import Count, Limits, RoleState, next_replicas, next_replicas_of_roles

DEFAULT = Limits(surge=1, unavailable=0)
Seen = dict[str, dict[str, Count]]
"""By role and revision."""


def planned(
    desired: dict[str, int], seen: Seen, limits: Limits = DEFAULT, starved: frozenset[str] = frozenset()
) -> Seen:
    """What is asked for the revision "new", as counts: available are those that were, as far as they stay."""
    states = {role: RoleState(desired[role], seen.get(role, {}), limits, role in starved) for role in desired}
    return {
        role: {name: kept(seen.get(role, {}).get(name), count) for name, count in requested.items()}
        for role, requested in next_replicas_of_roles("new", states).items()
    }


def kept(before: Count | None, replicas: int) -> Count:
    """After scaling to `replicas`."""
    if before is None:
        return Count(replicas, 0, worked=False)
    if before.available_by_index is None:
        return replace(before, replicas=replicas, available=min(before.available, replicas))
    flags = [*before.available_by_index, *([False] * replicas)][:replicas]
    return replace(before, replicas=replicas, available=sum(flags), available_by_index=flags)


@pytest.mark.parametrize(
    ("desired", "most_new", "limits", "seen", "expected"),
    [
        pytest.param(2, 1, DEFAULT, (Count(2, 2), Count(1, 1)), {"old": 2, "new": 1}, id="as before"),
        pytest.param(5, 1, DEFAULT, (Count(2, 2), Count(1, 1)), {"old": 5, "new": 1}, id="scaled up"),
        pytest.param(5, 1, Limits(1, 1), (Count(2, 2), Count(1, 1)), {"old": 4, "new": 1}, id="one may be missing"),
        pytest.param(5, 1, DEFAULT, (Count(2, 2), Count(0, 0)), {"old": 5, "new": 1}, id="before its first engine"),
        pytest.param(10, 4, DEFAULT, (Count(2, 2), Count(1, 1)), {"old": 9, "new": 2}, id="both within the surge"),
        pytest.param(10, 4, DEFAULT, (Count(2, 2), Count(3, 3)), {"old": 7, "new": 4}, id="the canary has its share"),
        pytest.param(
            5, 1, DEFAULT, (Count(2, 1, expired=True), Count(1, 1)), {"old": 1, "new": 1}, id="without room for the old"
        ),
        pytest.param(1, 1, DEFAULT, (Count(2, 2), Count(1, 1)), {"old": 1, "new": 1}, id="scaled down"),
    ],
)
def test_old_revision_is_scaled_when_a_canary_runs(
    desired: int, most_new: int, limits: Limits, seen: tuple[Count, Count], expected: dict[str, int]
) -> None:
    role = RoleState(desired, {"old": seen[0], "new": seen[1]}, limits, most_new=most_new)
    assert next_replicas_of_roles("new", {"unified": role}, "old")["unified"] == expected


@given(
    desired=st.integers(0, 12),
    most_new=st.integers(0, 12),
    limits=st.builds(Limits, st.integers(0, 3), st.integers(0, 3)).filter(
        lambda limits: limits.surge or limits.unavailable
    ),
    old=st.integers(0, 12),
    new=st.integers(0, 12),
)
def test_canary_ends_with_all_wanted_engines_and_within_the_surge(
    desired: int, most_new: int, limits: Limits, old: int, new: int
) -> None:
    """Engines become available at once. However many there were, a canary of at least one engine comes to rest."""
    most_new = max(1, min(most_new, desired))
    seen, before = {"old": Count(old, old), "new": Count(new, new)}, dict[str, int]()
    for _ in range(60):
        role = RoleState(desired, seen, limits, most_new=most_new)
        counts = next_replicas_of_roles("new", {"unified": role}, "old")["unified"]
        if counts == before:
            break
        had = sum(count.replicas for count in seen.values())
        assert sum(counts.values()) <= max(had, desired + limits.surge)
        before, seen = counts, {name: Count(number, number) for name, number in counts.items()}
    assert counts == before
    if desired and old:
        assert sum(counts.values()) >= min(desired, desired - limits.unavailable + counts["new"])
        assert counts["new"] <= most_new


@pytest.mark.parametrize(
    ("desired", "seen", "expected"),
    [
        pytest.param(
            {"prefill": 1, "decode": 2},
            {},
            {"prefill": {"new": 1}, "decode": {"new": 2}},
            id="first start: all at once",
        ),
        pytest.param(
            {"prefill": 1, "decode": 2},
            {"prefill": {"old": Count(1, 1)}, "decode": {"old": Count(2, 2)}},
            {"prefill": {"old": 1, "new": 1}, "decode": {"old": 2, "new": 1}},
            id="one new of each beside all old",
        ),
        pytest.param(
            {"prefill": 1, "decode": 2},
            {"prefill": {"old": Count(1, 1), "new": Count(1, 0)}, "decode": {"old": Count(2, 2), "new": Count(1, 1)}},
            {"prefill": {"old": 1, "new": 1}, "decode": {"old": 2, "new": 1}},
            id="decode waits for prefill",
        ),
        pytest.param(
            {"prefill": 1, "decode": 2},
            {"prefill": {"old": Count(1, 1), "new": Count(1, 1)}, "decode": {"old": Count(2, 2), "new": Count(1, 1)}},
            {"prefill": {"old": 1, "new": 1}, "decode": {"old": 1, "new": 2}},
            id="half of decode is new: the old half keeps its prefill",
        ),
        pytest.param(
            {"prefill": 1, "decode": 2},
            {"prefill": {"old": Count(1, 1), "new": Count(1, 1)}, "decode": {"old": Count(1, 1), "new": Count(2, 2)}},
            {"prefill": {"new": 1}, "decode": {"new": 2}},
            id="all of decode is new: old prefill goes",
        ),
        pytest.param(
            {"prefill": 0, "decode": 2},
            {"prefill": {"old": Count(1, 1)}, "decode": {"old": Count(2, 2), "new": Count(1, 1)}},
            {"prefill": {"old": 1, "new": 0}, "decode": {"old": 1, "new": 2}},
            id="a role that is given up stays as long as old engines need it",
        ),
        pytest.param(
            {"prefill": 0, "decode": 2},
            {"prefill": {"old": Count(1, 1)}, "decode": {"new": Count(2, 2)}},
            {"prefill": {"new": 0}, "decode": {"new": 2}},
            id="and then goes",
        ),
    ],
)
def test_next_replicas_of_roles_by_observed_counts(
    desired: dict[str, int], seen: Seen, expected: dict[str, dict[str, int]]
) -> None:
    requested = planned(desired, seen)
    assert {role: {name: c.replicas for name, c in counts.items()} for role, counts in requested.items()} == expected


def test_a_role_releases_gpus_when_another_role_waits_for_them() -> None:
    """Three GPUs, and the one that decode let go went to prefill: old prefill must not wait for decode."""
    seen = {"prefill": {"old": Count(1, 1), "new": Count(1, 1)}, "decode": {"old": Count(1, 1), "new": Count(2, 0)}}
    waiting = planned({"prefill": 1, "decode": 2}, seen)
    assert waiting["prefill"]["old"].replicas == 1
    starved = planned({"prefill": 1, "decode": 2}, seen, starved=frozenset({"decode"}))
    assert "old" not in starved["prefill"]


@pytest.mark.parametrize(
    ("flags", "available", "expected"),
    [((True, True), 1, 1), ((False, True), 1, 2), ((False, True), 2, 2), ((False, False), 1, 1), ((True,), 0, 0)],
)
def test_replicas_to_keep_when_the_highest_group_index_is_removed_first(
    flags: tuple[bool, ...], available: int, expected: int
) -> None:
    assert Count(len(flags), sum(flags), available_by_index=flags).replicas_with(available) == expected


def test_scale_down_waits_when_only_the_highest_group_serves() -> None:
    seen = {"new": Count(2, 1, available_by_index=(False, True))}
    assert next_replicas(1, "new", seen, DEFAULT) == {"new": 2}
    assert next_replicas(1, "new", {"new": Count(2, 1, available_by_index=(True, False))}, DEFAULT) == {"new": 1}


limits = st.sampled_from([Limits(1, 0), Limits(0, 1), Limits(2, 1), Limits(3, 0)])
events = st.sampled_from(["edit", "edit back", "scale", "ready", "crash", "recovers", "deadline"])
steps = st.lists(st.tuples(events, st.sampled_from(["prefill", "decode"]), st.integers(0, 4)), max_size=40)


def changed(event: str, value: int, counts: dict[str, Count]) -> dict[str, Count]:
    """What happens to the engines of one role."""
    if event in {"ready", "recovers"}:
        return {n: _with_available(c, min(c.replicas, c.available + value)) for n, c in counts.items()}
    if event == "crash":
        return {n: _with_available(c, max(0, c.available - value)) for n, c in counts.items()}
    if event == "deadline":
        return {n: replace(c, expired=True) for n, c in counts.items()}
    return counts


def _with_available(count: Count, available: int) -> Count:
    """The highest indexes are available where not all are: the hardest case."""
    flags = [index >= count.replicas - available for index in range(count.replicas)]
    by_index = None if count.available_by_index is None else flags
    worked = count.worked or available > 0
    return replace(count, available=available, worked=worked, expired=False, available_by_index=by_index)


@given(limits, steps, st.booleans())
def test_rollout_of_roles_never_removes_serving_engines(
    limits: Limits, events: list[tuple[str, str, int]], in_groups: bool
) -> None:
    """Any sequence of edits, scalings, starts, crashes and recoveries, with the plan carried out after each."""
    desired, revision, before_edit = {"prefill": 1, "decode": 2}, "r0", "r0"
    seen: Seen = {"prefill": {}, "decode": {}}
    for number, (event, role, value) in enumerate(events):
        if event == "edit":
            before_edit, revision = revision, f"r{number}"
        elif event == "edit back":
            before_edit, revision = revision, before_edit
        elif event == "scale":
            desired = {**desired, role: value}
        seen = {**seen, role: changed(event, value, seen[role])}
        states = {each: RoleState(desired[each], seen[each], limits) for each in desired}
        requested = next_replicas_of_roles(revision, states)
        after: Seen = {}
        for each, replicas in requested.items():
            fresh = Count(0, 0, worked=False, available_by_index=() if in_groups else None)
            after[each] = {name: kept(seen[each].get(name, fresh), n) for name, n in replicas.items()}
            before = sum(count.available for count in seen[each].values())
            assert sum(c.available for c in after[each].values()) >= min(desired[each] - limits.unavailable, before)
            total, had = sum(replicas.values()), sum(count.replicas for count in seen[each].values())
            assert total <= desired[each] + limits.surge or (total <= had and (in_groups or not desired[each]))
            assert list(replicas)[-1] == revision, "what grows is carried out last"
        seen = after


turns = st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 2)), min_size=4, max_size=30)


@given(st.integers(1, 4), st.integers(1, 4), turns)
def test_old_decode_engines_keep_prefill_engines_of_their_revision(
    prefill: int, decode: int, turns: list[tuple[str, int]]
) -> None:
    """In whatever order new engines of both roles become available."""
    desired = {"prefill": prefill, "decode": decode}
    seen: Seen = {role: {"old": Count(n, n)} for role, n in desired.items()}
    for role, value in turns:
        new = seen[role].get("new", Count(0, 0))
        seen[role] = {**seen[role], "new": _with_available(new, min(new.replicas, new.available + value))}
        seen = planned(desired, seen)
        old = {each: counts.get("old", Count(0, 0)).available for each, counts in seen.items()}
        new_of = {each: counts.get("new", Count(0, 0)).available for each, counts in seen.items()}
        assert not old["decode"] or old["prefill"], "old decode engines were left without prefill"
        assert old["decode"] == decode or new_of["prefill"], "old decode engines went before the first new pair"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6), st.integers(0, 6), limits, st.booleans())
def test_rollout_converges_to_the_desired_replicas(
    prefill: int, decode: int, old_prefill: int, old_decode: int, limits: Limits, from_unified: bool
) -> None:
    desired = {"prefill": prefill, "decode": decode}
    seen: Seen = {"prefill": {}, "decode": {"old": Count(old_decode, old_decode)}}
    if not from_unified:
        seen["prefill"] = {"old": Count(old_prefill, old_prefill)}
    for _ in range(3 * (prefill + decode) + 3):
        after = planned(desired, seen, limits)
        seen = {role: {n: Count(c.replicas, c.replicas) for n, c in counts.items()} for role, counts in after.items()}
    assert seen == {role: {"new": Count(n, n)} for role, n in desired.items()}
