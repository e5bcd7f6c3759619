"""`crds/inferenceservices.yaml` out of the models: `python -m mini_infer_operator.crd > crds/inferenceservices.yaml`.

Turns pydantic's JSON schema into the structural form that Kubernetes wants (no references, no nulls); knows no field.
"""

import sys
from typing import Any

from mini_infer_contract.resources import GROUP, KIND, PLURAL, VERSION, InferenceService
from mini_infer_operator.yaml_output import to_yaml

_HEADER = "# Made from contract/mini_infer_contract/resources by `python -m mini_infer_operator.crd`; do not edit.\n"
_READY = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS = [
    {"name": "Ready", "type": "string", "jsonPath": f"{_READY}.status"},
    {"name": "Reason", "type": "string", "jsonPath": f"{_READY}.reason"},
    {"name": "Model", "type": "string", "jsonPath": ".status.model"},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Ready replicas", "type": "integer", "jsonPath": ".status.readyReplicas"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]

_SCALE = {
    "specReplicasPath": ".spec.unified.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}
"""What `kubectl scale`, HorizontalPodAutoscalers and KEDA read and write."""


def custom_resource_definition() -> dict[str, Any]:
    """The CustomResourceDefinition of InferenceService."""
    schema = InferenceService.model_json_schema(by_alias=True)
    root = _structural(schema, schema.get("$defs", {}))
    root["properties"] |= {
        "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
        "kind": {"type": "string", "description": f"{KIND}."},
        "metadata": {"type": "object"},  # described by the API server itself
    }
    root["required"] = ["spec"]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": _SCALE},
        "additionalPrinterColumns": _COLUMNS,
        "schema": {"openAPIV3Schema": root},
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["infsvc"],
        "categories": ["all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """`schema` with references put in place, `X or null` as an optional X, and only the keywords Kubernetes takes."""
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
    """Print the file."""
    sys.stdout.write(_HEADER + to_yaml([custom_resource_definition()], compact=True))


if __name__ == "__main__":
    main()
