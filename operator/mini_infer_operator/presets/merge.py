"""Merges a preset's fields under those of a service, and records which fields it set. Pure; reads unchecked objects."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer_operator.resource import ROLES

Object = Mapping[str, Any]

OF_ROLES = ("resources", "engine", "template", "parallelism")
"""Fields of a preset that apply to every role of a service."""
LIST_KEYS = {
    "claims": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists that are merged item by item, with the field that names an item, as server-side apply does."""
ALTERNATIVES = {"kvCacheMemory": "gpuMemoryUtilization", "gpuMemoryUtilization": "kvCacheMemory"}
"""Options of which a service may write one: its own choice replaces the preset's."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A service's spec with a preset's fields, and the paths of the fields that come from the preset."""

    spec: dict[str, Any]
    fields: tuple[str, ...]


def merged(spec: Object, preset: Object) -> Merged:
    """Returns the spec with the fields of a preset's spec that the service leaves out. The service's own fields win.

    Mappings are merged field by field, and lists of LIST_KEYS item by item; other lists and values are taken whole.
    """
    result, fields = dict(spec), list[str]()
    if preset.get("image") is not None and spec.get("image") is None:
        result["image"] = preset["image"]
        fields.append("image")
    settings = {name: preset[name] for name in OF_ROLES if preset.get(name) is not None}
    for role in ROLES:
        if isinstance(own := spec.get(role), Mapping):
            result[role] = _merged(own, settings, role, fields)
    return Merged(result, tuple(fields))


def _merged(own: Object, preset: Object, path: str, fields: list[str]) -> dict[str, Any]:
    result = {name: value for name, value in own.items() if value is not None}
    for name, value in preset.items():
        inner, mine = f"{path}.{name}", own.get(name)
        if mine is None:
            if own.get(ALTERNATIVES.get(name, "")) is None:
                result[name] = value
                fields += _leaves(value, inner)
        elif isinstance(mine, Mapping) and isinstance(value, Mapping):
            result[name] = _merged(mine, value, inner, fields)
        elif name in LIST_KEYS and isinstance(mine, list) and isinstance(value, list):
            result[name] = _merged_list(mine, value, LIST_KEYS[name], inner, fields)
    return result


def _merged_list(own: Sequence[Any], preset: Sequence[Object], key: str, path: str, fields: list[str]) -> list[Any]:
    """Returns the preset's items that the service lacks, then the service's: later variables can use earlier ones."""
    taken = {item.get(key) for item in own if isinstance(item, Mapping)}
    added = [item for item in preset if item[key] not in taken]
    fields += [f"{path}[{item[key]}]" for item in added]
    return [*added, *own]


def _leaves(value: Any, path: str) -> Iterator[str]:
    """Yields the path of each value below a mapping; a list counts as one value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}")
    else:
        yield path
