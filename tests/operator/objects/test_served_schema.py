from pathlib import Path
from typing import Any

import yaml

from mini_infer_operator.crd import custom_resource_definition
from mini_infer_operator.objects.served_schema import Difference, compare, fitted

FIRST = yaml.safe_load((Path(__file__).parents[1] / "data" / "first-crd.yaml").read_text())


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def condition(kind: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": "R"}


def test_the_crd_is_current_when_schemas_are_equal() -> None:
    ours = schema_of(custom_resource_definition())
    assert compare(ours, ours) == Difference()
    assert compare(ours, ours).state == "current"


def test_the_crd_is_older_when_fields_are_missing_and_newer_when_it_has_more() -> None:
    small = {"properties": {"spec": {"properties": {"a": {"type": "string", "enum": ["x"]}}}}}
    large = {
        "properties": {
            "spec": {"properties": {"a": {"type": "string", "enum": ["x", "y"]}, "b": {"properties": {"c": {}}}}},
            "list": {"items": {"properties": {"d": {}}}},
        }
    }
    assert compare(small, large) == Difference(missing=("list", "spec.a=y", "spec.b"))
    assert compare(small, large).state == "older"
    assert compare(large, small) == Difference(unknown=("list", "spec.a=y", "spec.b"))
    assert compare(large, small).state == "newer"


def test_the_crd_of_the_first_version_is_older() -> None:
    difference = compare(schema_of(FIRST), schema_of(custom_resource_definition()))
    assert difference.state == "older"
    assert "status.conditions[].type=Stalled" in difference.missing


def test_status_is_reduced_to_fields_of_an_older_crd() -> None:
    status = {
        "observedGeneration": 3,
        "conditions": [condition("Ready"), condition("Stalled")],
        "replicas": 2,
        "someFieldOfLater": {"x": 1},
    }
    schema = schema_of(FIRST)["properties"]["status"]
    assert fitted(status, schema) == {"observedGeneration": 3, "conditions": [condition("Ready")], "replicas": 2}
    assert fitted(status, None) == status
    ours = schema_of(custom_resource_definition())["properties"]["status"]
    kept = {key: value for key, value in status.items() if key != "someFieldOfLater"}
    assert fitted(kept, ours) == kept
