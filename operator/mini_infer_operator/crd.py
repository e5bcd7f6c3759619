"""Generates `crds/` from the models: `python -m mini_infer_operator.crd crds` writes both files.

Turns pydantic's JSON schema into the structural form that Kubernetes requires (no references, no nulls); knows no
field.
"""

import sys
from pathlib import Path
from typing import Any

from mini_infer_operator.resource import (
    GROUP,
    KIND,
    PLURAL,
    PRESET_KIND,
    PRESET_PLURAL,
    ROLES,
    SCALER_KIND,
    SCALER_PLURAL,
    VERSION,
    ApiModel,
    InferencePreset,
    InferenceScaler,
    InferenceService,
)
from mini_infer_operator.yaml_output import to_yaml

_HEADER = "# Made from contract/mini_infer_contract/resources by `make crds`; do not edit.\n"
_READY = '.status.conditions[?(@.type=="Ready")]'
_ROLE = '.status.roles[?(@.name=="{}")].ready'
_COLUMNS: list[dict[str, str | int]] = [
    {"name": "Ready", "type": "string", "jsonPath": f"{_READY}.status"},
    {"name": "Reason", "type": "string", "jsonPath": f"{_READY}.reason"},
    {"name": "Model", "type": "string", "jsonPath": ".status.model"},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Ready replicas", "type": "integer", "jsonPath": ".status.readyReplicas"},
    {"name": "Prefill", "type": "string", "jsonPath": _ROLE.format("prefill")},
    {"name": "Decode", "type": "string", "jsonPath": _ROLE.format("decode")},
    {"name": "TP", "type": "string", "jsonPath": ".status.tensorParallel"},
    {"name": "GPUs", "type": "integer", "jsonPath": ".status.gpus"},
    {"name": "Canary", "type": "string", "jsonPath": ".status.canary.phase", "priority": 1},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]

_SCALE = {
    "specReplicasPath": ".spec.unified.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}
"""The scale subresource: the fields that `kubectl scale`, HorizontalPodAutoscalers and KEDA read and write."""

_SCALER_COLUMNS: list[dict[str, str | int]] = [
    {"name": "Service", "type": "string", "jsonPath": ".spec.service"},
    {"name": "Role", "type": "string", "jsonPath": ".spec.role"},
    {"name": "Wanted", "type": "integer", "jsonPath": ".spec.replicas"},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Message", "type": "string", "jsonPath": ".status.message"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]
_SCALER_SCALE = {**_SCALE, "specReplicasPath": ".spec.replicas"}
_PRESET_COLUMNS: list[dict[str, str | int]] = [
    {"name": "Families", "type": "string", "jsonPath": ".spec.match.families"},
    {"name": "GPU", "type": "string", "jsonPath": ".spec.match.gpu"},
    {"name": "Image", "type": "string", "jsonPath": ".spec.image"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]
_DESCRIBED_ONCE = ("template", "resources", "kvCache", "parallelism", "scaling")
"""Fields of a role whose inner fields have descriptions for `kubectl explain` in `unified` only: three copies
would make the resource too large for the annotation of `kubectl apply`.
"""


def custom_resource_definitions() -> list[dict[str, Any]]:
    """Returns every CustomResourceDefinition of the project."""
    return [custom_resource_definition(), scaler_definition(), preset_definition()]


def custom_resource_definition() -> dict[str, Any]:
    """Returns the CustomResourceDefinition of InferenceService."""
    root = _root(InferenceService, KIND)
    roles = root["properties"]["spec"]["properties"]
    for role in set(ROLES) - {"unified"}:
        fields = roles[role]["properties"]
        for name in _DESCRIBED_ONCE:
            fields[name] = {**_undescribed(fields[name]), "description": fields[name]["description"]}
    return _definition(KIND, PLURAL, ["infsvc"], _COLUMNS, _SCALE, root)


def scaler_definition() -> dict[str, Any]:
    """Returns the CustomResourceDefinition of InferenceScaler."""
    root = _root(InferenceScaler, SCALER_KIND)
    return _definition(SCALER_KIND, SCALER_PLURAL, ["infscaler"], _SCALER_COLUMNS, _SCALER_SCALE, root)


def preset_definition() -> dict[str, Any]:
    """Returns the CustomResourceDefinition of InferencePreset."""
    root = _root(InferencePreset, PRESET_KIND)
    return _definition(PRESET_KIND, PRESET_PLURAL, ["infpreset"], _PRESET_COLUMNS, None, root, scope="Cluster")


def _root(model: type[ApiModel], kind: str) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    root = _structural(schema, schema.get("$defs", {}))
    root["properties"] |= {
        "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
        "kind": {"type": "string", "description": f"{kind}."},
        "metadata": {"type": "object"},  # described by the API server itself
    }
    root["required"] = ["spec"]
    return root


def _definition(
    kind: str,
    plural: str,
    short: list[str],
    columns: list[dict[str, str | int]],
    scale: dict[str, str] | None,
    root: dict[str, Any],
    scope: str = "Namespaced",
) -> dict[str, Any]:
    """Returns a definition; without `scale`, of a resource that has neither a scale subresource nor a status."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        **({"subresources": {"status": {}, "scale": scale}} if scale is not None else {}),
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": root},
    }
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
        "shortNames": short,
        "categories": ["all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": scope, "names": names, "versions": [version]},
    }


def _undescribed(schema: Any) -> Any:
    """Returns the schema without descriptions, at any depth. A field named `description` stays."""
    if isinstance(schema, dict):
        texts = {key for key in schema if key == "description" and isinstance(schema[key], str)}
        return {key: _undescribed(item) for key, item in schema.items() if key not in texts}
    return [_undescribed(item) for item in schema] if isinstance(schema, list) else schema


def _structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns `schema` with references resolved, `X or null` as an optional X, and only the keywords that Kubernetes
    takes.
    """
    result = dict(schema)
    if "$ref" in result:
        target = definitions[result.pop("$ref").rsplit("/", 1)[1]]
        result = {**target, **result}
    options = result.get("anyOf", [])
    if {"type": "null"} in options:
        (only,) = [option for option in options if option != {"type": "null"}]
        rest = {key: value for key, value in result.items() if key != "anyOf"}
        return _structural({**only, **rest}, definitions)
    for keyword in ("title", "$defs"):
        result.pop(keyword, None)
    if result.get("default", ...) in (None, [], 0, ""):
        result.pop(
            "default", None
        )  # an absent field reads the same, and defaults that say nothing clutter every object
    if "const" in result:
        result["enum"] = [result.pop("const")]
    if "exclusiveMinimum" in result:  # OpenAPI 3.0 has it as a flag
        result["minimum"], result["exclusiveMinimum"] = result["exclusiveMinimum"], True
    if "description" in result:
        result["description"] = " ".join(result["description"].split())
    if "properties" in result:
        result["properties"] = {name: _structural(item, definitions) for name, item in result["properties"].items()}
    if "items" in result:
        result["items"] = _structural(result["items"], definitions)
        result["items"].pop("description", None)  # `kubectl explain` shows the list's own
    additional = result.pop("additionalProperties", False)
    if additional is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    elif additional:
        result["additionalProperties"] = _structural(additional, definitions)
    return result


def main() -> None:
    """Writes the files into the folder that the command line names."""
    for definition in custom_resource_definitions():
        path = Path(sys.argv[1]) / f"{definition['spec']['names']['plural']}.yaml"
        path.write_text(_HEADER + to_yaml([definition], compact=True))


if __name__ == "__main__":
    main()
