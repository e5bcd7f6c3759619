from typing import Any

import pytest

from mini_infer_operator.objects.drift import Drift, additions

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
def test_additions(found: dict[str, Any], paths: list[str]) -> None:
    manager = found["metadata"]["managedFields"][0]["manager"]
    assert additions(found, MANIFEST) == [Drift(manager, path) for path in paths]


def test_annotations_of_pods_are_left_alone() -> None:
    template = {"metadata": {"labels": {}, "annotations": {"model": "m"}}}
    manifest = {"spec": {"template": template}}
    fields = {"f:template": {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}}
    found = {"metadata": {"managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": fields}}]}}
    assert additions(found, manifest) == []


def test_managers_that_may_add_are_ignored() -> None:
    found = live("linkerd", {"f:containers": {'k:{"name":"proxy"}': {}}})
    assert additions(found, MANIFEST)
    assert additions(found, MANIFEST, ["linkerd"]) == []
