from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_infer_operator.objects.history import (
    KEPT,
    change_to,
    differences,
    pinned_spec,
    retained_revisions,
    spec_of,
    with_history,
)


def kept(revision: str, number: int, **data: Any) -> dict[str, Any]:
    return {
        "kind": "ControllerRevision",
        "metadata": {"name": f"demo-unified-{revision}"},
        "revision": number,
        "data": {"template": revision, **data},
    }


def numbers(manifests: list[dict[str, Any]]) -> dict[str, int]:
    return {m["metadata"]["name"].rsplit("-", 1)[1]: m["revision"] for m in manifests}


def test_a_new_revision_gets_the_highest_number_and_keeps_stored_ones() -> None:
    new, other = kept("c", 1), {"kind": "Deployment", "metadata": {"name": "d"}}
    live = [kept("a", 1), kept("b", 2, spec={"image": "x"})]
    result = with_history([new, other, kept("b", 1)], live, "c", {"image": "y"})
    assert numbers([m for m in result if m["kind"] == "ControllerRevision"]) == {"c": 3, "b": 2}
    assert result[0]["data"] == {"template": "c", "spec": {"image": "y"}}
    assert result[2]["data"] == {"template": "b", "spec": {"image": "x"}}
    assert result[1] == other


def test_a_revision_gets_the_highest_number_when_it_is_rolled_back_to() -> None:
    live = [kept("a", 1, spec={}), kept("b", 2, spec={})]
    back = with_history([kept("a", 1)], live, "a", {"image": "z"})
    assert numbers(back) == {"a": 3}
    assert back[0]["data"] == live[0]["data"]  # never changed
    again = with_history([kept("a", 1)], [*back, live[1]], "a", {"image": "z"})
    assert again == back


def test_only_the_newest_revisions_are_retained() -> None:
    live = [kept(str(number), number) for number in range(1, 32)]
    for item in live[:30]:
        item["metadata"]["ownerReferences"] = [{"uid": "u"}]  # the last one was left behind
    assert retained_revisions(live, "other") == set()
    assert retained_revisions(live, "u") == {f"demo-unified-{number}" for number in range(30 - KEPT, 31)}
    assert spec_of(live[0]) is None
    assert spec_of(kept("a", 1, spec={"image": "x"})) == {"image": "x"}


def test_replicas_still_change_when_a_rollout_is_paused() -> None:
    was = {"image": "a", "unified": {"replicas": 1, "engine": {"dtype": "auto"}}}
    now = {"image": "b", "unified": {"replicas": 5, "engine": {"dtype": "float32"}}, "rollout": {"paused": True}}
    assert pinned_spec(now, was) == {
        "image": "a",
        "unified": {"replicas": 5, "engine": {"dtype": "auto"}},
        "rollout": {"paused": True},
    }


JSON = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), JSON, max_size=4)


def merged(value: Any, change: Any) -> Any:
    """RFC 7396."""
    if not isinstance(change, dict):
        return change
    result = dict(value) if isinstance(value, dict) else {}
    for key, item in change.items():
        if item is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), item)
    return result


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(OBJECTS, OBJECTS)
def test_a_recorded_change_turns_the_old_spec_into_the_new(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert merged(before, change_to(before, after)) == after
    assert differences(before, before) == []


def test_differences_name_field_old_and_new_value() -> None:
    before = {"image": "a", "unified": {"engine": {"dtype": "auto"}}}
    after = {"image": "b", "unified": {"engine": {}}}
    assert differences(before, after) == ["image: a -> b", "unified.engine.dtype: auto -> (none)"]
