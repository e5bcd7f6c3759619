"""InferenceServices for tests: a valid one, and the way to change it."""

import copy
from pathlib import Path
from typing import Any

import yaml

VALID: dict[str, Any] = {
    "apiVersion": "serving.mini-infer.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "demo", "namespace": "default"},
    "spec": {"model": {"uri": "demo"}, "unified": {"replicas": 2}},
}
VALID_PRESET: dict[str, Any] = {
    "apiVersion": "serving.mini-infer.io/v1alpha1",
    "kind": "InferencePreset",
    "metadata": {"name": "preset"},
    "spec": {"match": {"families": ["demo"]}},
}
_RULES = Path(__file__).parents[1] / "operator" / "resource"


def changed(change: dict[str, Any], base: dict[str, Any] = VALID) -> dict[str, Any]:
    """`base` with `change` merged over it; None removes a field (RFC 7396)."""
    result = copy.deepcopy(base)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = changed(value, result.get(key, {}))
        else:
            result[key] = value
    return result


def failing_examples() -> list[dict[str, Any]]:
    """The table of what must be refused."""
    return list(yaml.safe_load((_RULES / "rules.yaml").read_text()))


def failing_presets() -> list[dict[str, Any]]:
    """The table of presets that must be refused."""
    return list(yaml.safe_load((_RULES / "preset_rules.yaml").read_text()))
