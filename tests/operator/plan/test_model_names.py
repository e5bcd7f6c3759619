from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_infer_operator.plan.model_names import ModelNames


def service(created: str, model: str | None = None, **metadata: Any) -> dict[str, Any]:
    spec = {"model": {"uri": "demo", **({"name": model} if model else {})}}
    return {"metadata": {"creationTimestamp": created, **metadata}, "spec": spec}


def test_the_oldest_service_owns_a_model_name_and_others_are_requeued_when_that_changes() -> None:
    names = ModelNames()
    assert names.update(("b", "young"), service("2026-02", "shared")) == set()
    assert names.update(("a", "old"), service("2026-01", "shared")) == {("b", "young")}
    assert names.claimants("shared") == ["a/old", "b/young"]
    assert names.update(("a", "old"), service("2026-01", "shared")) == set()  # no news
    assert names.update(("c", "shared"), service("2026-03")) == {("b", "young"), ("a", "old")}  # by metadata.name
    assert names.update(("a", "old"), service("2026-01", "other")) == {("b", "young"), ("c", "shared")}
    assert names.claimants("shared") == ["b/young", "c/shared"]
    assert names.update(("b", "young"), service("2026-02", "shared", deletionTimestamp="now")) == {("c", "shared")}
    assert names.update(("c", "shared"), None) == set()
    assert names.claimants("shared") == []


def test_model_name_owners_are_decided_by_name_when_services_are_equally_old() -> None:
    names = ModelNames()
    for key in (("b", "x"), ("a", "y"), ("a", "x")):
        names.update(key, service("2026-01", "shared"))
    assert names.claimants("shared") == ["a/x", "a/y", "b/x"]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["m", "n", None]), st.sampled_from("123")), max_size=20)
)
def test_model_names_equal_a_plain_dictionary_after_any_changes(changes: list[tuple[str, str | None, str]]) -> None:
    names, now = ModelNames(), dict[tuple[str, str], tuple[str, str]]()
    for name, model, created in changes:
        key = ("ns", name)
        names.update(key, service(created, model) if model else None)
        now.pop(key, None)
        if model:
            now[key] = (model, created)
    for model in ("m", "n"):
        expected = sorted((created, *key) for key, (claimed, created) in now.items() if claimed == model)
        assert names.claimants(model) == [f"{namespace}/{name}" for _, namespace, name in expected]
