"""Reads a JSON body into a msgspec struct, for every dialect alike: strict types, and each fault named by its path.

Knows no dialect. Ranges that msgspec cannot state are checked where the values are used.
"""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from mini_infer_web.api_errors import MAX_QUOTED, Fault, FieldPath, field_name, shortened

UnknownFieldsMode = Literal["refuse", "warn"]
"""Policy for a field that this server does not know."""
_MAX_NESTED = 16
"""Unknown fields within one top-level field that are ignored; more are refused."""

_MOST_FAULTS = 100
"""Unknown fields that are counted: a body may have a hundred thousand, and others wait."""

StructType = TypeVar("StructType", bound=msgspec.Struct)


class UnknownFields:
    """Refuses the unknown fields of one request, or ignores them and records their paths."""

    def __init__(self, mode: UnknownFieldsMode = "refuse") -> None:
        self.mode = mode
        self.are_ignored = mode == "warn"
        self.ignored: list[FieldPath] = []

    @property
    def names(self) -> list[str]:
        """Returns the names of the fields that were ignored."""
        return [field_name(path) for path in self.ignored]


def read_body(
    body: dict[str, Any], kind: type[StructType], unknown: UnknownFields | None = None
) -> tuple[StructType | None, list[Fault]]:
    """Returns the body as `kind`, or None and its faults: every unknown field, and the first fault in each other."""
    try:
        return msgspec.convert(body, kind), []
    except msgspec.ValidationError:
        pass  # found again below, field by field
    values, faults = _values(body, kind, unknown or UnknownFields())
    if faults:
        return None, faults
    try:
        return msgspec.convert(values, kind), []
    except msgspec.ValidationError as error:  # the struct's own check of fields that do not go together
        return None, [Fault((), (shortened(str(error)),), "invalid_value")]


def quoted(value: object) -> str:
    """Returns a client's value as an error shows it: its beginning, if it is long."""
    if isinstance(value, dict):
        value = dict(islice(value.items(), MAX_QUOTED))
    elif isinstance(value, str | list):
        value = value[:MAX_QUOTED]
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits; levels upon levels
        return f"a value of type {type(value).__name__}"


def unknown_field(path: FieldPath) -> Fault:
    """Returns the fault of a field that this server does not know."""
    return Fault(path, (" is an unknown field: this server does not know it",), "unknown_field")


def _values(
    body: Mapping[str, Any], kind: type[msgspec.Struct], unknown: UnknownFields
) -> tuple[dict[str, Any], list[Fault]]:
    """Checks each field of the body that `kind` knows by itself. Returns the values and the faults."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name in body:
        if name in fields:
            continue
        if unknown.are_ignored:
            unknown.ignored.append((name,))
        elif len(faults) < _MOST_FAULTS:
            faults.append(unknown_field((name,)))
    for name, field in fields.items():
        if name in body:
            values[name], fault = _checked(name, body[name], field.type, unknown)
            faults += [] if fault is None else [fault]
        elif field.required:
            faults.append(Fault((name,), (" is missing: send this field",), "missing_field"))
    return values, faults


def _checked(name: str, value: object, kind: Any, unknown: UnknownFields) -> tuple[object, Fault | None]:
    """Returns the value without the unknown fields in it that are ignored, and its first other fault."""
    for _ in range(_MAX_NESTED + 1):
        try:
            # In a list, a fault of the value itself has a place, too: a client's words in it are not taken for one.
            msgspec.convert([value], list[kind])
            return value, None
        except msgspec.ValidationError as error:
            whole = str(error)
        found = _FAULT.fullmatch(whole)
        if found is None:
            return value, _fault((name,), whole, value)
        problem, inner = found["says"], _path(found["place"])
        extra = problem.removeprefix(_UNKNOWN).removesuffix("`") if problem.startswith(_UNKNOWN) else None
        if extra is None:
            wrong = _at(value, inner)
            if isinstance(wrong, dict) and (found["is_key"] or found["place"].endswith("[...]")):
                key = _entry(value, inner, kind)
                inner = (*inner, *key)
                wrong = wrong if not key else key[0] if found["is_key"] else wrong[key[0]]
            return value, _fault((name, *inner), problem, wrong, () if inner else _choices(kind))
        if not unknown.are_ignored:
            return value, unknown_field((name, *inner, extra))
        unknown.ignored.append((name, *inner, extra))
        value = _without(value, inner, extra)
    return value, unknown_field((name, *inner, extra or ""))


_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_FAULT = re.compile(r"(?P<says>.*) - at (?P<is_key>`key` in )?`\$\[0\](?P<place>[^`]*)`", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|\.([^.\[\]]+)|(\[\.\.\.\])")
"""A step of a place as msgspec writes it: an index, a field, or any entry of an object."""


def _path(place: str) -> FieldPath:
    """Returns a place of msgspec's as a path, up to `[...]`: an entry of an object whose key msgspec does not say."""
    path: list[str | int] = []
    for index, name, entry in _STEP.findall(place):
        if entry:
            break
        path.append(int(index) if index else name)
    return tuple(path)


def _at(value: Any, path: FieldPath) -> Any:
    for part in path:
        value = value[part]
    return value


def _entry(value: Any, path: FieldPath, kind: Any) -> FieldPath:
    """Returns the key of the first entry at fault in the object at `path`, which msgspec does not say; () if it is not
    found.
    """
    entries = _at(value, path)
    for key in islice(entries, _MOST_ENTRIES):
        try:
            msgspec.convert([_with(value, path, {key: entries[key]})], list[kind])
        except msgspec.ValidationError:
            return (key,)
    return ()


_MOST_ENTRIES = 100


def _with(value: Any, path: FieldPath, new: object) -> Any:
    """A copy of `value` with `new` in place of what is at `path`."""
    if not path:
        return new
    inner = _with(value[path[0]], path[1:], new)
    if isinstance(value, list):
        return [inner if index == path[0] else item for index, item in enumerate(value)]
    return value | {path[0]: inner}


def _without(value: Any, path: FieldPath, name: str) -> Any:
    """A copy of `value` without the field `name` of what is at `path`."""
    return _with(value, path, {key: inner for key, inner in _at(value, path).items() if key != name})


def _choices(kind: Any) -> tuple[str, ...]:
    """Returns the values that a field may have, if its type lists them, or lists them beside null."""
    choices = [arg for one in (kind, *get_args(kind)) if get_origin(one) is Literal for arg in get_args(one)]
    return tuple(map(str, choices))


def _fault(path: FieldPath, problem: str, value: object, choices: tuple[str, ...] = ()) -> Fault:
    if problem.startswith(_MISSING):
        missing = problem.removeprefix(_MISSING).removesuffix("`")
        return Fault((*path, missing), (" is missing: send this field",), "missing_field")
    if problem.startswith("Expected `null`"):
        return Fault(path, (f" = {quoted(value)} is not supported here: leave it out",), "unsupported_value")
    if problem.startswith("Invalid value"):  # of the field that tells the members of a union apart
        return Fault(path, (f" is {quoted(value)}: this server does not support it",), "invalid_value")
    if problem.startswith("Invalid enum value"):
        known = f", it knows {', '.join(choices)}" if choices else ""
        return Fault(path, (f" is {quoted(value)}: this server does not know this value{known}",), "invalid_value")
    return Fault(path, (f" is {quoted(value)}: {_lower(problem)}",), "invalid_value")


def _lower(problem: str) -> str:
    return problem[:1].lower() + problem[1:]
