"""Whether an object is a JSON schema as far as its keywords have the right form. Knows no tools and no grammars."""

from typing import Any

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LIST_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLE_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Fault = tuple[str, str]
"""Where, and what is wrong there."""


def fault_in_schema(schema: object, where: str) -> Fault | None:
    """The first keyword that has the wrong form; None: all have theirs. Schemas may be nested up to Python's limit."""
    try:
        return _fault(schema, where)
    except RecursionError:
        return where, "is nested too deeply"


def _fault(schema: object, where: str) -> Fault | None:
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return where, "must be a JSON schema: an object, true or false"
    if (fault := _fault_in_type(schema.get("type"), where)) is not None:
        return fault
    required = schema.get("required")
    if required is not None and not _are_strings(required):
        return f"{where}.required", "must be a list of names"
    if "enum" in schema and not isinstance(schema["enum"], list):
        return f"{where}.enum", "must be a list of values"
    return next((fault for part in _parts(schema, where) if (fault := _part_fault(*part)) is not None), None)


def _fault_in_type(kind: object, where: str) -> Fault | None:
    names = kind if isinstance(kind, list) else [kind]
    wrong = next((name for name in names if name is not None and not _is_type(name)), None)
    if wrong is None:
        return None
    return f"{where}.type", f"is {wrong!r}; types are {', '.join(sorted(_TYPES))}"


def _is_type(name: object) -> bool:
    return isinstance(name, str) and name in _TYPES


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _parts(schema: dict[str, Any], where: str) -> list[tuple[type, Any, str]]:
    """What stands in place of schemas: of which kind it must be, what it is, and where."""
    parts: list[tuple[type, Any, str]] = []
    for keyword, value in schema.items():
        place = f"{where}.{keyword}"
        if keyword in _SCHEMA:
            # Before 2020-12, `items` could be a list.
            parts.append((list if keyword == "items" and isinstance(value, list) else object, value, place))
        elif keyword in _LIST_OF_SCHEMAS:
            parts.append((list, value, place))
        elif keyword in _TABLE_OF_SCHEMAS:
            parts.append((dict, value, place))
    return parts


def _part_fault(kind: type, value: Any, where: str) -> Fault | None:
    if kind is object:
        return _fault(value, where)
    if not isinstance(value, kind) or not isinstance(value, list | dict):
        return where, "must be a list of schemas" if kind is list else "must be an object of schemas"
    if isinstance(value, list):
        places = [(f"{where}[{index}]", schema) for index, schema in enumerate(value)]
    else:
        places = [(f"{where}.{name}", schema) for name, schema in value.items()]
    return next((fault for place, schema in places if (fault := _fault(schema, place)) is not None), None)
