"""Checks that an object is a JSON schema as far as its keywords have the right form. Knows no tools and no grammars."""

from typing import Any

from mini_infer_web.api_errors import FieldPath
from mini_infer_web.body_fields import quoted

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LIST_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLE_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_PARTS: dict[str, type] = {
    **dict.fromkeys(_SCHEMA, object),
    **dict.fromkeys(_LIST_OF_SCHEMAS, list),
    **dict.fromkeys(_TABLE_OF_SCHEMAS, dict),
}
"""Types of keywords that contain schemas: one, a list of them, or a table."""

Fault = tuple[FieldPath, str]
"""A place, and what is wrong there: the sentence behind the field's name."""


def fault_in_schema(schema: object) -> Fault | None:
    """Returns the first keyword of the wrong form; None if all are right. Schemas may be nested up to Python's limit.

    A place is only put together if something is wrong: a request may have twenty thousand schemas, and others wait.
    """
    try:
        return _fault(schema)
    except RecursionError:
        return (), "is nested too deeply"


def _fault(schema: object) -> Fault | None:
    """Returns the first fault; its place is the part that comes after this schema's own."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return (), "must be a JSON schema: an object, true or false"
    for keyword, value in schema.items():
        if keyword in _PARTS:
            fault = _fault_in_part(_PARTS[keyword], keyword, value)
        elif keyword in _FORMS:
            fault = _FORMS[keyword](value)
        else:
            continue
        if fault is not None:
            return (keyword, *fault[0]), fault[1]
    return None


def _fault_in_type(kind: object) -> Fault | None:
    if kind is None or (isinstance(kind, str) and kind in _TYPES):
        return None
    names = kind if isinstance(kind, list) else [kind]
    wrong = [name for name in names if name is not None and not (isinstance(name, str) and name in _TYPES)]
    return ((), f"is {quoted(wrong[0])}; types are {', '.join(sorted(_TYPES))}") if wrong else None


def _fault_in_required(value: object) -> Fault | None:
    is_right = value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    return None if is_right else ((), "must be a list of names")


def _fault_in_enum(value: object) -> Fault | None:
    return None if isinstance(value, list) else ((), "must be a list of values")


_FORMS = {"type": _fault_in_type, "required": _fault_in_required, "enum": _fault_in_enum}


def _fault_in_part(kind: type, keyword: str, value: Any) -> Fault | None:
    if kind is object and not (keyword == "items" and isinstance(value, list)):  # which it could be before 2020-12
        return _fault(value)
    if isinstance(value, dict) and kind is dict:
        for name, schema in value.items():
            if (fault := _fault(schema)) is not None:
                return (name, *fault[0]), fault[1]
        return None
    if isinstance(value, list) and kind is not dict:
        for index, schema in enumerate(value):
            if (fault := _fault(schema)) is not None:
                return (index, *fault[0]), fault[1]
        return None
    return (), "must be an object of schemas" if kind is dict else "must be a list of schemas"
