from typing import Any

import pytest

from mini_infer_operator.objects.drift import SOMEBODY, Drift, additions, changes

MANIFEST = {
    "spec": {
        "replicas": 2,
        "template": {
            "spec": {
                "containers": [
                    {"name": "engine", "env": [{"name": "HOME"}], "ports": [{"containerPort": 8000, "name": "http"}]}
                ]
            }
        },
    }
}
ENGINE = 'k:{"name":"engine"}'


def live(manager: str, template_spec: dict[str, Any], **spec: Any) -> dict[str, Any]:
    template = {"f:template": {"f:spec": template_spec}} if template_spec else {}
    return {"metadata": {"managedFields": [{"manager": manager, "fieldsV1": {"f:spec": {**template, **spec}}}]}}


@pytest.mark.parametrize(
    ("found", "paths"),
    [
        (live("kubectl", {}), []),
        (live("kubectl-rollout", {}, **{"f:paused": {}}), ["spec.paused"]),
        (live("kubectl", {"f:hostNetwork": {}}), ["spec.template.spec.hostNetwork"]),
        (
            live("kubectl-set", {"f:containers": {ENGINE: {"f:env": {'k:{"name":"FOO"}': {".": {}, "f:value": {}}}}}}),
            ["spec.template.spec.containers[engine].env[FOO]"],
        ),
        (live("kubectl", {"f:containers": {'k:{"name":"evil"}': {}}}), ["spec.template.spec.containers[evil]"]),
        (  # what `kubectl apply` of our own manifest leaves
            live(
                "kubectl",
                {
                    "f:containers": {
                        ENGINE: {
                            ".": {},
                            "f:name": {},
                            "f:env": {'k:{"name":"HOME"}': {".": {}, "f:name": {}}},
                            "f:ports": {'k:{"containerPort":8000,"protocol":"TCP"}': {"f:name": {}}},
                        }
                    }
                },
                **{"f:replicas": {}},
            ),
            [],
        ),
        (
            live("argocd", {}, **{"f:template": {"f:metadata": {"f:annotations": {"f:restartedAt": {}}}}}),
            ["spec.template.metadata"],
        ),
    ],
)
def test_drift_lists_fields_that_other_managers_added(found: dict[str, Any], paths: list[str]) -> None:
    manager = found["metadata"]["managedFields"][0]["manager"]
    assert additions(found, MANIFEST) == [Drift(manager, path) for path in paths]


def test_drift_ignores_pod_annotations() -> None:
    template = {"metadata": {"labels": {}, "annotations": {"model": "m"}}}
    manifest = {"spec": {"template": template}}
    fields = {"f:template": {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}}
    found = {"metadata": {"managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": fields}}]}}
    assert additions(found, manifest) == []


def test_drift_ignores_managers_when_they_are_allowed() -> None:
    found = live("linkerd", {"f:containers": {'k:{"name":"proxy"}': {}}})
    assert additions(found, MANIFEST)
    assert additions(found, MANIFEST, ["linkerd"]) == []


def stored(manager: str, fields: dict[str, Any], *, own: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    managed = [{"manager": manager, "fieldsV1": {"f:spec": fields}}] if fields else []
    return {"metadata": {"managedFields": managed, "ownFields": [own]}, "spec": {**MANIFEST["spec"], **spec}}


def engine(**fields: Any) -> dict[str, Any]:
    (container,) = MANIFEST["spec"]["template"]["spec"]["containers"]  # type: ignore[index]
    return {"template": {"spec": {"containers": [{**container, **fields}]}}}


IN_ENGINE = {"f:template": {"f:spec": {"f:containers": {ENGINE: {"f:env": {'k:{"name":"HOME"}': {"f:value": {}}}}}}}}
MANIFEST_WITH_HOME = {"spec": {**MANIFEST["spec"], **engine(env=[{"name": "HOME", "value": "/tmp"}])}}
REPLICAS: dict[str, Any] = {"f:replicas": {}}


@pytest.mark.parametrize(
    ("found", "drifts"),
    [
        (stored("kubectl", REPLICAS, own={}, spec={"replicas": 5}), [Drift("kubectl", "spec.replicas")]),
        (stored("kubectl", REPLICAS, own={}, spec={}), []),
        (stored("kubectl", {}, own=REPLICAS, spec={"replicas": 5}), []),
        (stored("kubectl", REPLICAS, own=REPLICAS, spec={"replicas": 5}), []),
    ],
    ids=["set by another", "set to what it is", "decided by the operator", "shared, decided by the operator"],
)
def test_a_changed_field_is_drift_when_the_operator_lost_it(found: dict[str, Any], drifts: list[Drift]) -> None:
    assert changes(found, MANIFEST) == drifts


@pytest.mark.parametrize(
    ("fields", "spec", "drift"),
    [
        (IN_ENGINE, engine(env=[{"name": "HOME", "value": "/root"}]), Drift("kubectl", "env[HOME].value")),
        ({}, engine(env=[{"name": "HOME"}]), Drift(SOMEBODY, "env[HOME].value")),
        ({}, engine(env=[]), Drift(SOMEBODY, "env[HOME]")),
    ],
    ids=["changed", "value removed", "variable removed"],
)
def test_a_variable_is_drift_when_it_is_changed_or_removed(
    fields: dict[str, Any], spec: dict[str, Any], drift: Drift
) -> None:
    path = f"spec.template.spec.containers[engine].{drift.path}"
    found = stored("kubectl", fields, own={}, spec=spec)
    assert changes(found, MANIFEST_WITH_HOME) == [Drift(drift.manager, path)]


def test_a_quantity_is_no_drift_when_it_is_written_another_way() -> None:
    limits = {"f:template": {"f:spec": {"f:containers": {ENGINE: {"f:resources": {"f:limits": {"f:memory": {}}}}}}}}
    manifest = {"spec": {**MANIFEST["spec"], **engine(resources={"limits": {"memory": "1Gi"}})}}
    found = stored("kubectl", limits, own={}, spec=engine(resources={"limits": {"memory": "1024Mi"}}))
    assert changes(found, manifest) == []
