from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_operator.objects.cache import ObjectCache
from mini_infer_operator.objects.observed_objects import observed_of
from mini_infer_operator.objects.trim import trimmed
from mini_infer_operator.resource import LABEL_REVISION, LABEL_ROLE

SERVICE = "serving.mini-infer.io/service"
DEPLOYED = "NewReplicaSetAvailable"


def pod(name: str, version: int, service: str = "s", uid: str = "u", namespace: str = "n") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    spec, status = {"nodeName": "node", "containers": []}, {"message": f"changed at {version}"}
    return {"metadata": {**metadata, "labels": {SERVICE: service}}, "spec": spec, "status": status}


def test_cache_ignores_older_versions_and_accepts_a_new_uid() -> None:
    cache = ObjectCache()
    assert cache.put("Pod", pod("a", 5)) == ("n", "s")
    assert cache.put("Pod", pod("a", 5)) is None
    assert cache.put("Pod", pod("a", 4)) is None
    assert cache.put("Pod", pod("a", 3, uid="other")) == ("n", "s")


def test_cache_moves_an_object_when_its_service_label_changes() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod("a", 1, service="one"))
    cache.put("Pod", pod("a", 2, service="two"))
    assert cache.of_service("Pod", "n", "one") == []
    assert len(cache.of_service("Pod", "n", "two")) == 1


def test_cache_keeps_only_the_fields_that_are_read() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod("a", 1))
    kept = cache.get("Pod", "n", "a")
    assert kept is not None
    assert kept["spec"] == {"nodeName": "node"}
    fields = [
        {"manager": "mini-infer-operator", "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {
            "manager": "kubectl",
            "time": "2026-01-02T00:00:00Z",
            "fieldsV1": {"f:spec": {"f:paused": {}}, "f:metadata": {}},
        },
        {"manager": "kcm", "subresource": "status", "time": "2026-01-02T00:00:00Z", "fieldsV1": {"f:status": {}}},
    ]
    cache.put("Deployment", {**pod("d", 1), "metadata": {**pod("d", 1)["metadata"], "managedFields": fields}})
    deployment = cache.get("Deployment", "n", "d")
    assert deployment is not None
    assert deployment["metadata"]["lastApplied"] == "2026-01-01T00:00:00Z"
    assert deployment["metadata"]["managedFields"] == [
        {"manager": "kubectl", "fieldsV1": {"f:spec": {"f:paused": {}}}},
    ]


def test_cache_reports_no_change_when_a_version_differs_in_nothing_that_is_read() -> None:
    cache, begun = ObjectCache(), {"type": "Progressing", "status": "True", "reason": "NewReplicaSetCreated"}
    metadata = pod("d", 1)["metadata"]
    deployment = {"metadata": metadata, "spec": {"replicas": 1}}
    assert cache.put("Deployment", deployment) == ("n", "s")
    later = {**deployment, "metadata": {**metadata, "resourceVersion": "2"}}
    assert cache.put("Deployment", {**later, "status": {"observedGeneration": 1, "conditions": [begun]}}) is None
    kept = cache.get("Deployment", "n", "d")
    assert kept is not None
    assert kept["metadata"]["resourceVersion"] == "2"  # it is kept all the same
    ready = {**deployment, "metadata": {**metadata, "resourceVersion": "3"}, "status": {"readyReplicas": 1}}
    assert cache.put("Deployment", ready) == ("n", "s")


def test_an_answer_that_differs_in_nothing_that_is_read_outlives_a_list_that_began_before_it() -> None:
    cache, first = ObjectCache(), pod("a", 5)
    cache.put("Pod", first)
    again = {**first, "metadata": {**first["metadata"], "resourceVersion": "8"}}
    assert cache.written("Pod", again) is None
    assert cache.replace("Pod", None, [], version=7) == set()
    assert cache.get("Pod", "n", "a") is not None


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"replicas": 2, "readyReplicas": 2, "availableReplicas": 1, "observedGeneration": 3},
        {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "quota", "lastUpdateTime": "x"}]},
        {"readyReplicas": 0, "conditions": [{"type": "Progressing", "status": "True", "reason": DEPLOYED}]},
        {"readyReplicas": 0, "conditions": [{"type": "Progressing", "status": "True", "reason": "Other"}]},
    ],
)
def test_a_trimmed_deployment_is_observed_as_the_whole_one_is(status: dict[str, Any]) -> None:
    labels = {SERVICE: "s", LABEL_ROLE: "unified", LABEL_REVISION: "r"}
    whole = {"metadata": {**pod("d", 1)["metadata"], "labels": labels}, "spec": {"replicas": 2}, "status": status}
    of_whole, of_trimmed = (
        observed_of([each], [], "engine:1", min_ready=timedelta(0), now=datetime(2026, 1, 1, tzinfo=UTC))
        for each in (whole, trimmed("Deployment", whole))
    )
    assert of_trimmed == of_whole


def test_cache_knows_which_manifest_a_version_contains_until_the_object_changes_or_is_gone() -> None:
    cache, live = ObjectCache(), pod("a", 5)
    cache.set_applied("Pod", live, b"manifest")
    assert not cache.is_applied("Pod", live, b"manifest")  # an object that is not cached is compared each time
    cache.put("Pod", live)
    cache.set_applied("Pod", live, b"manifest")
    assert cache.is_applied("Pod", live, b"manifest")
    assert not cache.is_applied("Pod", live, b"another")
    assert not cache.is_applied("Pod", pod("a", 6), b"manifest")
    assert not cache.is_applied("Pod", pod("a", 5, uid="other"), b"manifest")
    cache.drop("Pod", "n", "a")
    assert not cache.is_applied("Pod", live, b"manifest")


names = st.sampled_from(["a", "b", "c"])
changes = st.lists(st.tuples(st.sampled_from(["put", "drop", "list"]), names, st.sampled_from(["s", "t"])), max_size=30)


@given(changes)
def test_cache_equals_a_plain_dictionary_after_any_events(events: list[tuple[str, str, str]]) -> None:
    cache, plain = ObjectCache(), dict[str, dict[str, Any]]()
    for version, (event, name, service) in enumerate(events, start=1):
        if event == "put":
            plain[name] = pod(name, version, service)
            assert cache.put("Pod", plain[name]) == ("n", service)
        elif event == "drop":
            known = plain.pop(name, None)
            assert (cache.drop("Pod", "n", name) is None) == (known is None)
        else:  # a list after a broken watch: one object is gone, the others are as they were
            removed = plain.pop(name, None)
            before = {("n", removed["metadata"]["labels"][SERVICE])} if removed else set()
            assert cache.replace("Pod", None, plain.values()) == before
        for owner in ("s", "t"):
            owned = {item["metadata"]["name"] for item in cache.of_service("Pod", "n", owner)}
            assert owned == {key for key, item in plain.items() if item["metadata"]["labels"][SERVICE] == owner}
        assert set(cache.keys("Pod")) == {("n", key) for key in plain}


BORN, LAST = 5, 10
HISTORY = {4: None, BORN: "old", 6: "old", 7: "old", 8: None, 9: "new", LAST: "new"}
"""By version, the uid of the pod `a`: created by us, changed, changed by us, deleted, created by us again, changed."""
OURS = (5, 7, 9)
"""The versions of our own writes, whose answers arrive at any time."""
Step = tuple[str, int]


def orders() -> Iterator[list[Step]]:
    """Every order of six events with three answers among them, which overtake each other, and a list in any place."""
    for places in product(range(BORN, LAST + 2), repeat=len(OURS)):
        for answers in permutations(zip(places, OURS, strict=True)):
            for listed in range(BORN - 1, LAST + 1):
                steps: list[Step] = []
                for version in range(BORN, LAST + 2):
                    steps += [("answer", ours) for place, ours in answers if place == version]
                    steps += [("list", version)] if version == listed else []
                    steps += [("event", version)] if listed < version <= LAST or listed < BORN else []
                yield [step for step in steps if step[1] <= LAST]


def take(cache: ObjectCache, step: str, version: int) -> None:
    uid, before = HISTORY[version], HISTORY[version - 1]
    found = [pod("a", version, uid=uid)] if uid else []
    if step == "answer":
        cache.written("Pod", found[0])
    elif step == "list":
        cache.replace("Pod", None, found, version)
    elif found:
        cache.put("Pod", found[0])
    else:
        cache.drop("Pod", "n", "a", uid=before, version=version)


def seen(cache: ObjectCache) -> tuple[str, int] | None:
    found = cache.get("Pod", "n", "a")
    return (found["metadata"]["uid"], int(found["metadata"]["resourceVersion"])) if found else None


def test_an_answer_never_undoes_what_the_watch_reported_when_it_arrives_at_any_time() -> None:
    for steps in orders():
        cache, reported = ObjectCache(), BORN - 1
        cache.replace("Pod", None, (), reported)
        for step, version in steps:
            take(cache, step, version)
            reported = version if step != "answer" else reported
            later = [(uid, at) if uid else None for at, uid in HISTORY.items() if at >= reported]
            assert seen(cache) in later, (steps, step, version)
        assert seen(cache) == ("new", LAST), steps


def test_an_answer_is_no_news_when_the_deletion_was_reported() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod("a", 5))
    cache.put("Pod", pod("a", 6))
    cache.drop("Pod", "n", "a")
    assert cache.put("Pod", pod("a", 6)) is None
    assert cache.written("Pod", pod("a", 6)) is None
    assert cache.keys("Pod") == []


def test_an_answer_is_no_news_when_a_list_no_longer_had_the_object() -> None:
    """The object was created and deleted while the watch was broken: nothing else was ever reported of it."""
    cache = ObjectCache()
    cache.replace("Pod", None, (), 20)
    assert cache.written("Pod", pod("a", 15)) is None
    assert cache.written("Pod", pod("b", 21)) == ("n", "s")
    assert cache.replace("Pod", None, (), 20) == set()
    assert cache.keys("Pod") == [("n", "b")]
    assert cache.replace("Pod", None, (), 22) == {("n", "s")}


def test_an_answer_is_dropped_when_a_list_passes_it_without_the_object() -> None:
    cache = ObjectCache()
    cache.written("Pod", pod("a", 7))
    cache.written("Pod", pod("far", 7, namespace="m"))
    assert cache.replace("Pod", "n", (), 6) == set()
    assert cache.replace("Pod", "n", (), 7) == {("n", "s")}
    assert cache.keys("Pod") == [("m", "far")]


def test_what_the_watch_reported_stays_when_a_list_that_began_earlier_arrives_later() -> None:
    cache = ObjectCache()
    for name in ("a", "b"):
        cache.put("Pod", pod(name, 5))
    cache.put("Pod", pod("a", 12))
    cache.drop("Pod", "n", "b", uid="u", version=13)
    cache.put("Pod", pod("new", 14))
    reported = {("n", "a"), ("n", "b"), ("n", "new")}
    assert cache.replace("Pod", None, [pod("a", 5), pod("b", 5)], 10, besides=reported) == set()
    kept = {pod["metadata"]["name"]: pod["metadata"]["resourceVersion"] for pod in cache.of_service("Pod", "n", "s")}
    assert kept == {"a": "12", "new": "14"}
    assert cache.written("Pod", pod("b", 11)) is None


def test_an_older_deletion_does_not_remove_when_the_name_is_used_again() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod("a", 5, uid="old"))
    cache.written("Pod", pod("a", 8, uid="new"))
    assert cache.drop("Pod", "n", "a", uid="old", version=7) is None
    assert seen(cache) == ("new", 8)


def test_an_object_is_back_when_it_matches_the_selector_again() -> None:
    """A watch with a label selector reports DELETED for an object that lost the label, and goes on to exist."""
    cache = ObjectCache()
    cache.put("Pod", pod("a", 5))
    cache.drop("Pod", "n", "a", uid="u", version=6)
    assert cache.put("Pod", pod("a", 7)) == ("n", "s")


def test_a_list_wins_when_the_api_server_was_restored_from_a_backup() -> None:
    cache = ObjectCache()
    for name in "ab":
        cache.put("Pod", pod(name, 50))
    cache.drop("Pod", "n", "b", uid="u", version=60)
    cache.replace("Pod", None, [pod("a", 40), pod("b", 41)], 45)
    assert seen(cache) == ("u", 40)
    assert cache.keys("Pod") == [("n", "a"), ("n", "b")]


@pytest.mark.parametrize("kept", [10, 100])
def test_tombstones_are_bounded_when_many_objects_are_deleted(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer_operator.objects.cache.MOST_TOMBSTONES", kept)
    cache = ObjectCache()
    for number in range(200):
        cache.put("Pod", pod(str(number), 5, uid=str(number)))
        cache.drop("Pod", "n", str(number))
    retained = [n for n in range(200) if cache.put("Pod", pod(str(n), 5, uid=str(n))) is None]
    assert retained == list(range(200 - kept, 200))
