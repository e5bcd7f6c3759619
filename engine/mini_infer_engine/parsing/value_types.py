"""Finds the JSON types that an argument's schema allows, for formats that write texts without quotes.

Clients send schemas, so anything may stand behind a keyword; what JSON Schema does not know is ignored.
"""

from typing import Any


def value_types(schema: Any) -> set[str]:
    """Returns the types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    found = schema.get("type")
    types = {kind for kind in (found if isinstance(found, list) else [found]) if isinstance(kind, str)}
    for part in (*_list(schema, "anyOf"), *_list(schema, "oneOf")):
        types |= value_types(part) or {"object"}
    for value in (*_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])):
        types.add("string" if isinstance(value, str) else "null" if value is None else "number")
    return types or ({"object"} if schema.keys() & {"properties", "$ref", "allOf", "items"} else set())


def is_text(types: set[str]) -> bool:
    """Returns True if a value of these types is a text without quotes: a string, or null."""
    return types <= {"string"} or types == {"string", "null"}


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []
