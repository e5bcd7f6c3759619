"""Compares the schema that the API server has for InferenceServices with ours: which is older, and what fits. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_operator.resource import GROUP, KIND, VERSION

Schema = Mapping[str, Any]
OPENAPI_PATH = f"/openapi/v3/apis/{GROUP}/{VERSION}"
"""Path of the served schema. Any service account may read it (system:discovery), even with rights in one namespace
only.
"""
_NOT_OURS = {"apiVersion", "kind", "metadata"}


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between the served schema and ours, as paths of fields, or `path=value` for values of an enum."""

    missing: tuple[str, ...] = ()
    """Paths that our schema has and the served one lacks."""
    unknown: tuple[str, ...] = ()
    """Paths that the served schema has and ours lacks."""

    @property
    def state(self) -> Literal["current", "older", "newer"]:
        """Age of the served CRD relative to this operator."""
        if self.missing:
            return "older"
        return "newer" if self.unknown else "current"


def served_schema(openapi: Mapping[str, Any]) -> Schema | None:
    """Returns our kind's schema from the document at OPENAPI_PATH; None if it is not there."""
    for schema in openapi.get("components", {}).get("schemas", {}).values():
        named = schema.get("x-kubernetes-group-version-kind", ())
        if any((item.get("group"), item.get("version"), item.get("kind")) == (GROUP, VERSION, KIND) for item in named):
            return {**schema, "properties": {k: v for k, v in schema["properties"].items() if k not in _NOT_OURS}}
    return None


def compare(served: Schema, ours: Schema) -> Difference:
    """Returns the paths that only one of the schemas has, without the fields below a missing field."""
    there, here = set(_parts(served, "")), set(_parts(ours, ""))
    return Difference(_topmost(here - there), _topmost(there - here))


def fitted(value: Any, schema: Schema | None) -> Any:
    """Returns `value` without fields that `schema` does not know, and without list items with an unknown enum value."""
    if schema is None or schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, Mapping) and "properties" in schema:
        properties = schema["properties"]
        return {key: fitted(item, properties[key]) for key, item in value.items() if key in properties}
    if isinstance(value, list) and "items" in schema:
        return [fitted(item, schema["items"]) for item in value if _is_served(item, schema["items"])]
    return value


def _is_served(item: Any, schema: Schema) -> bool:
    if not isinstance(item, Mapping):
        return True
    enums = {name: field["enum"] for name, field in schema.get("properties", {}).items() if "enum" in field}
    return all(item[name] in values for name, values in enums.items() if name in item)


def _parts(schema: Schema, path: str) -> Iterator[str]:
    for value in schema.get("enum", ()):
        yield f"{path}={value}"
    for name, field in schema.get("properties", {}).items():
        if path or name not in _NOT_OURS:
            inner = f"{path}.{name}" if path else name
            yield inner
            yield from _parts(field, inner)
    if "items" in schema:
        yield from _parts(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from _parts(schema["additionalProperties"], f"{path}.*")


def _topmost(paths: set[str]) -> tuple[str, ...]:
    return tuple(
        sorted(p for p in paths if not any(p != q and p.startswith((f"{q}.", f"{q}[", f"{q}=")) for q in paths))
    )
