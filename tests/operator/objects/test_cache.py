from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mini_infer_operator.objects.cache import ObjectCache

SERVICE = "serving.mini-infer.io/service"


def pod(name: str, version: int, service: str = "s", uid: str = "u", namespace: str = "n") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {SERVICE: service}}, "spec": {"nodeName": "node", "containers": []}}


def test_older_versions_are_no_news_and_another_object_of_the_name_is() -> None:
    cache = ObjectCache()
    assert cache.put("Pod", pod("a", 5)) == ("n", "s")
    assert cache.put("Pod", pod("a", 5)) is None
    assert cache.put("Pod", pod("a", 4)) is None
    assert cache.put("Pod", pod("a", 3, uid="other")) == ("n", "s")


def test_a_label_that_moves_takes_the_object_along() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod("a", 1, service="one"))
    cache.put("Pod", pod("a", 2, service="two"))
    assert cache.of_service("Pod", "n", "one") == []
    assert len(cache.of_service("Pod", "n", "two")) == 1


def test_only_what_is_read_is_kept() -> None:
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


names = st.sampled_from(["a", "b", "c"])
changes = st.lists(st.tuples(st.sampled_from(["put", "drop", "list"]), names, st.sampled_from(["s", "t"])), max_size=30)


@given(changes)
def test_it_holds_what_a_plain_dictionary_would(events: list[tuple[str, str, str]]) -> None:
    cache, plain = ObjectCache(), dict[str, dict[str, Any]]()
    for version, (event, name, service) in enumerate(events, start=1):
        if event == "put":
            plain[name] = pod(name, version, service)
            assert cache.put("Pod", plain[name]) == ("n", service)
        elif event == "drop":
            known = plain.pop(name, None)
            assert (cache.drop("Pod", "n", name) is None) == (known is None)
        else:  # a list after a broken watch: one object is gone, the others are as they were
            gone = plain.pop(name, None)
            before = {("n", gone["metadata"]["labels"][SERVICE])} if gone else set()
            assert cache.replace("Pod", None, plain.values()) == before
        for owner in ("s", "t"):
            held = {item["metadata"]["name"] for item in cache.of_service("Pod", "n", owner)}
            assert held == {key for key, item in plain.items() if item["metadata"]["labels"][SERVICE] == owner}
        assert set(cache.keys("Pod")) == {("n", key) for key in plain}
