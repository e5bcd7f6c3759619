import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_operator.plan.rollout import SURGE, Count, next_replicas


@pytest.mark.parametrize(
    ("wanted", "seen", "expected"),
    [
        pytest.param(2, {}, {"new": 2}, id="first start"),
        pytest.param(0, {}, {"new": 0}, id="none asked for"),
        pytest.param(2, {"old": Count(2, 2)}, {"new": 1, "old": 2}, id="one new beside all old"),
        pytest.param(2, {"old": Count(2, 2), "new": Count(1, 0)}, {"new": 1, "old": 2}, id="new one not ready: wait"),
        pytest.param(
            2, {"old": Count(2, 2), "new": Count(1, 1)}, {"new": 2, "old": 1}, id="new one ready: an old goes"
        ),
        pytest.param(2, {"old": Count(1, 1), "new": Count(2, 2)}, {"new": 2}, id="old revision removed"),
        pytest.param(2, {"old": Count(2, 0)}, {"new": 2}, id="old ones that never worked go at once"),
        pytest.param(3, {"old": Count(2, 2)}, {"new": 2, "old": 2}, id="edit and scale up together"),
        pytest.param(1, {"old": Count(3, 3)}, {"new": 1, "old": 1}, id="edit and scale down together"),
        pytest.param(0, {"old": Count(2, 2)}, {"new": 0}, id="scaled to zero"),
        pytest.param(
            2, {"a": Count(1, 1), "b": Count(2, 2)}, {"new": 1, "b": 2}, id="of two old revisions the larger serves on"
        ),
    ],
)
def test_table(wanted: int, seen: dict[str, Count], expected: dict[str, int]) -> None:
    assert next_replicas(wanted, "new", seen) == expected


steps = st.lists(st.tuples(st.sampled_from(["edit", "scale", "ready", "crash"]), st.integers(0, 5)), max_size=40)


@given(steps)
def test_what_can_answer_never_drops_by_our_doing(events: list[tuple[str, int]]) -> None:
    """Any sequence of edits, scalings, starts and crashes, with the plan carried out after each."""
    wanted, revision = 2, "r0"
    seen: dict[str, Count] = {}
    for number, (event, value) in enumerate(events):
        if event == "edit":
            revision = f"r{number}"
        elif event == "scale":
            wanted = value
        elif event == "ready":
            seen = {name: Count(c.replicas, min(c.replicas, c.available + value)) for name, c in seen.items()}
        else:
            seen = {name: Count(c.replicas, max(0, c.available - value)) for name, c in seen.items()}
        asked = next_replicas(wanted, revision, seen)
        before = sum(count.available for count in seen.values())
        # A Deployment that shrinks removes engines that cannot answer first.
        seen = {name: Count(n, min(n, seen.get(name, Count(0, 0)).available)) for name, n in asked.items()}
        assert sum(count.available for count in seen.values()) >= min(wanted, before)
        assert sum(asked.values()) <= wanted + SURGE
        assert all(n >= 0 for n in asked.values())
        assert list(asked)[-1] == revision, "what grows is carried out last"


@given(st.integers(0, 8), st.integers(0, 8))
def test_it_settles(wanted: int, old: int) -> None:
    seen = {"old": Count(old, old)}
    for _ in range(2 * wanted + 3):
        seen = {name: Count(n, n) for name, n in next_replicas(wanted, "new", seen).items()}
    assert seen == {"new": Count(wanted, wanted)}
    assert next_replicas(wanted, "new", seen) == {"new": wanted}
