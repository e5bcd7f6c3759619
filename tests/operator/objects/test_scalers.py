from typing import Any

from mini_infer_operator.objects.scalers import initial_replicas, scaled_spec, scaler_status

SPEC = {"model": {"uri": "demo"}, "prefill": {"replicas": 1}, "decode": {"engine": {}}}
STATUS = {"roles": [{"name": "prefill"}, {"name": "decode", "replicas": 3}]}


def scaler(name: str, role: str, replicas: int | None, created: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    spec = {"service": "pair", "role": role} | ({} if replicas is None else {"replicas": replicas})
    return {"metadata": {"name": name, "creationTimestamp": created}, "spec": spec}


def test_a_scaler_sets_the_replicas_of_its_role() -> None:
    scaled = scaled_spec(SPEC, [scaler("d", "decode", 4), scaler("u", "unified", 2), scaler("p", "prefill", None)])
    assert scaled == {**SPEC, "decode": {"engine": {}, "replicas": 4}}
    assert "replicas" not in SPEC["decode"]


def test_a_scaler_starts_with_its_roles_replicas_when_it_has_none() -> None:
    assert initial_replicas(scaler("d", "decode", None), SPEC) == 1
    assert initial_replicas(scaler("d", "decode", 0), SPEC) is None
    assert initial_replicas(scaler("u", "unified", None), SPEC) is None


def test_the_older_scaler_counts_when_a_role_has_two() -> None:
    old, new = scaler("z", "decode", 4), scaler("a", "decode", 5, "2026-01-02T00:00:00Z")
    assert scaled_spec(SPEC, [new, old])["decode"]["replicas"] == 4
    assert scaler_status(old, [new, old], SPEC, STATUS) == {
        "replicas": 3,
        "selector": "serving.mini-infer.io/service=pair,serving.mini-infer.io/role=decode",
    }
    assert scaler_status(new, [new, old], SPEC, STATUS) == {
        "message": "InferenceScaler z sets the number of decode engines of pair already"
    }


def test_a_scaler_reports_it_when_its_role_does_not_exist() -> None:
    lost = scaler("u", "unified", 2)
    assert scaler_status(lost, [lost], SPEC, STATUS) == {"message": "InferenceService pair has no unified engines"}
