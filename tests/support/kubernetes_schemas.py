"""Objects against the fields that a version of Kubernetes has: what is unknown there, missing, or of another type."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")  # written by scripts/kubernetes_schemas.py
_DOCUMENT: dict[str, Any] = json.loads(_FILE.read_text())
VERSIONS: tuple[str, ...] = tuple(sorted(_DOCUMENT["versions"]))
_PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "datetime": (str,),
    "float": (int, float),
    "int": (int,),
    "str": (str,),
}

_QUANTITIES = {"capacity", "limits", "requests"}
"""Maps of quantities, which the client types as texts and the API server reads as numbers, too."""


@cache
def _types(version: str) -> dict[str, dict[str, str]]:
    """Returns the fields of each type: each version is stored as the difference from the one before."""
    found: dict[str, dict[str, str]] = {}
    for each in VERSIONS:
        found |= _DOCUMENT["versions"][each]
        if each == version:
            break
    return found


def is_known(manifest: Mapping[str, Any]) -> bool:
    """Returns True if the object is one of Kubernetes' own kinds that the file has."""
    return f"{manifest['apiVersion']}/{manifest['kind']}" in _DOCUMENT["kinds"]


def faults(manifest: Mapping[str, Any], version: str) -> list[str]:
    """Returns what the version would not take, each with the field's path; values are compared by type alone."""
    kind = _DOCUMENT["kinds"][f"{manifest['apiVersion']}/{manifest['kind']}"]
    return list(_faults(manifest, kind, str(manifest["kind"]), _types(version)))


def _faults(value: Any, kind: str, path: str, types: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    kind = kind.removesuffix("!")
    if kind == "object":  # an integer or a text, or any object
        return
    if kind.startswith(("list[", "map[")):
        inner = kind.partition("[")[2].removesuffix("]")
        items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
        if isinstance(value, list) != kind.startswith("list["):
            yield f"{path}: {value!r} is no {kind}"
        for key, item in items:
            yield from _faults(item, inner, f"{path}[{key}]", types)
    elif kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{path}: {value!r} is no {kind}"
    elif not isinstance(value, dict):
        yield f"{path}: {value!r} is no {kind}"
    else:
        fields = types[kind]
        yield from (f"{path}.{name}: there is no such field" for name in value if name not in fields)
        yield from (
            f"{path}.{name}: is missing" for name, each in fields.items() if each[-1] == "!" and name not in value
        )
        for name, item in value.items():
            if name in _QUANTITIES and isinstance(item, dict):
                item = {key: str(each) if isinstance(each, int | float) else each for key, each in item.items()}
            if name in fields:
                yield from _faults(item, fields[name], f"{path}.{name}", types)
