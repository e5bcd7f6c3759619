"""JSON schemas of graded difficulty with the features of JSONSchemaBench (Geng et al., arXiv:2501.10868).

Made by a seeded generator, so that the set is the same everywhere and needs no data file. A schema of level n nests n
deep and draws from the features of the levels up to n. All of them can be satisfied.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
LEVELS = 5
_NAMES = ["id", "name", "kind", "items", "a b", "größe", "size", "next", "x-y", "$ref2", "unit", "created_at", "tags"]
_PATTERNS = ["^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(red|green|blue)$", "[A-Z]", "^v[0-9]+(\\.[0-9]+){2}$", "^$|^x+$"]
_FORMATS = ["date", "date-time", "time", "email", "uuid", "ipv4", "hostname", "uri"]


@dataclass(frozen=True)
class Graded:
    """One schema."""

    name: str
    level: int
    schema: Schema


def graded_schemas(count: int) -> list[Graded]:
    """The first `count`, levels in turn."""
    return [_graded(index) for index in range(count)]


def _graded(index: int) -> Graded:
    level = index % LEVELS + 1
    draw = random.Random(index)
    schema = _Maker(draw, level).root()
    return Graded(f"{index:03d}-level-{level}", level, schema)


class _Maker:
    def __init__(self, draw: random.Random, level: int) -> None:
        self._draw = draw
        self._level = level
        self._leaves: list[Callable[[], Schema]] = [
            self._plain,
            self._enum,
            self._bounded_integer,
            self._bounded_string,
        ]
        self._inner: list[Callable[[int], Schema]] = [self._object, self._array]
        if level >= 2:
            self._leaves += [self._const, self._nullable, self._pattern, self._exclusive]
            self._inner += [self._closed_object, self._bounded_array]
        if level >= 3:
            self._leaves += [self._format, self._large_enum, self._multiple]
            self._inner += [self._any_of, self._tuple, self._map]
        if level >= 4:
            self._inner += [self._all_of, self._one_of, self._pattern_properties]
        if level >= 5:
            self._inner += [self._reference, self._tree]
        self._definitions: Schema = {}

    def root(self) -> Schema:
        """Mostly an object, as in APIs."""
        schema = self._closed_object(self._level) if self._draw.random() < 0.8 else self._any(self._level)
        if self._definitions:
            schema = schema | {"$defs": self._definitions}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "a schema"} | schema

    def _any(self, depth: int) -> Schema:
        if depth <= 0 or self._draw.random() < 0.3:
            return self._draw.choice(self._leaves)()
        return self._draw.choice(self._inner)(depth)

    # -- Leaves

    def _plain(self) -> Schema:
        return {"type": self._draw.choice(["string", "integer", "number", "boolean", "null"]), "description": "plain"}

    def _enum(self) -> Schema:
        return {"enum": self._draw.sample(["a", "b c", 'q"uote', "ü", 1, 2.5, None, True, {"x": [1]}], 4)}

    def _const(self) -> Schema:
        return {"const": self._draw.choice(["fixed", 17, False, None, {"k": "v"}, [1, "two"]])}

    def _large_enum(self) -> Schema:
        return {"type": "string", "enum": [f"value-{number:04d}" for number in range(300)]}

    def _nullable(self) -> Schema:
        return {"type": [self._draw.choice(["string", "integer", "boolean"]), "null"]}

    def _bounded_integer(self) -> Schema:
        low = self._draw.randrange(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + self._draw.randrange(1, 5000)}

    def _exclusive(self) -> Schema:
        low = self._draw.randrange(-50, 50)
        return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + self._draw.choice([1, 7, 90])}

    def _multiple(self) -> Schema:
        return {"type": "integer", "multipleOf": self._draw.choice([2, 5, 10])}

    def _bounded_string(self) -> Schema:
        low = self._draw.randrange(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + self._draw.randrange(1, 20)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._draw.choice(_PATTERNS)}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._draw.choice(_FORMATS)}

    # -- What has others inside

    def _properties(self, depth: int) -> Schema:
        names = self._draw.sample(_NAMES, self._draw.randrange(1, 3 + self._level))
        properties = {name: self._any(depth - 1) for name in names}
        required = [name for name in names if self._draw.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required}

    def _object(self, depth: int) -> Schema:
        return self._properties(depth)

    def _closed_object(self, depth: int) -> Schema:
        return self._properties(depth) | {"additionalProperties": False}

    def _map(self, depth: int) -> Schema:
        return {"type": "object", "additionalProperties": self._any(depth - 1)}

    def _pattern_properties(self, depth: int) -> Schema:
        patterns = {"^n_": {"type": "integer"}, "^s_[a-z]+$": self._any(depth - 1)}
        return {"type": "object", "patternProperties": patterns, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        return {"type": "array", "items": self._any(depth - 1)}

    def _bounded_array(self, depth: int) -> Schema:
        low = self._draw.randrange(0, 3)
        return {"type": "array", "items": self._any(depth - 1), "minItems": low, "maxItems": low + 2}

    def _tuple(self, depth: int) -> Schema:
        first = [self._any(depth - 1), self._any(0)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1), self._any(0), {"type": "null"}]}

    def _one_of(self, depth: int) -> Schema:
        """Told apart by a constant, as tagged unions are."""
        kinds = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._any(depth - 1)},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind in ("first", "second")
        ]
        return {"oneOf": kinds}

    def _all_of(self, depth: int) -> Schema:
        return {"allOf": [{"type": "object", "properties": {"id": self._any(0)}}, {"required": ["id"]}]}

    def _reference(self, depth: int) -> Schema:
        name = f"shared{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(depth - 1)
        return {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/{name}"} for side in ("left", "right")},
            "required": ["left"],
            "additionalProperties": False,
        }

    def _tree(self, depth: int) -> Schema:
        name = f"tree{len(self._definitions)}"
        self._definitions[name] = {
            "type": "object",
            "properties": {
                "value": self._any(0),
                "children": {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}


def features_of(schema: object) -> Iterator[str]:
    """Keywords that a schema uses."""
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            yield keyword
            yield from features_of(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from features_of(item)
