"""Builds rules of Lark for arguments with bare keys and quoted strings, as Gemma writes them, by the function's schema.

JSON schemas have no such form, so their structure is converted here; numbers are left to llguidance. Knows no calls.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.structured.grammar import Grammar, literal, of_json_schema, text_up_to
from mini_infer_engine.structured.limits import GrammarError, check_json_depth, check_schema

_BARE_KEY = re.compile(r"[A-Za-z0-9_.$-]+")
_UNSUPPORTED = frozenset(("allOf", "not", "if", "patternProperties", "propertyNames", "prefixItems", "contains"))
_UNSUPPORTED |= {"uniqueItems", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"}
_UNSUPPORTED |= {"pattern", "minLength", "maxLength"}
"""Keywords that these rules do not enforce."""
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_MOST_RULES = 5_000
_BY_KEYWORD = (("properties", "object"), ("additionalProperties", "object"), ("items", "array"))


def quoted_rules(quote: str, special_tokens: Mapping[str, int]) -> str:
    """Returns the rules of any values, which those of schemas refer to. They refer to TEXT."""
    return (
        text_up_to("quoted_end", quote, special_tokens)
        + f"quoted: {literal(quote, special_tokens)} quoted_end\n"
        + 'any_value: quoted | ANY_SCALAR | "{" any_members "}" | "[" (any_value ("," any_value)*)? "]"\n'
        + 'any_members: (any_member ("," any_member)*)?\n'
        + 'any_member: ANY_KEY ":" any_value\n'
        + "ANY_KEY: /[A-Za-z0-9_.$-]+/\n"
        + r"ANY_SCALAR: /true|false|null|-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?/"
        + "\n"
    )


class QuotedMembers:
    """The members of one tool's arguments."""

    def __init__(
        self,
        tool: Tool,
        quote: str,
        special_tokens: Mapping[str, int],
        refer: Callable[[Grammar], str],
        rules: list[str],
    ) -> None:
        """Rules of the parts are added to `rules`."""
        self._tool = tool
        self._quote = quote
        self._special_tokens = special_tokens
        self._refer = refer
        self._rules = rules
        self._definitions: dict[str, int] = {}
        """Indices of the rules of definitions that were referred to."""
        self._pending: list[tuple[int, Any]] = []
        """Definitions whose rules are still to be made, so that a chain of references takes no stack."""

    def expression(self) -> str:
        """Returns the right side of a rule for what stands between the outer braces. Raises GrammarError if a strict
        tool's schema cannot be enforced.
        """
        check_json_depth(self._tool.parameters, "schema")
        check_schema(self._tool.parameters)
        made = self._members(self._tool.parameters)
        while self._pending:
            index, schema = self._pending.pop()
            self._rules[index] = f"part{index}: {self._value(schema)}"
        return made

    def _rule(self, body: str) -> str:
        if len(self._rules) >= _MOST_RULES:
            raise GrammarError(f"the tools' schemas have more than {_MOST_RULES} parts: shorten them")
        self._rules.append(f"part{len(self._rules)}: {body}")
        return f"part{len(self._rules) - 1}"

    def _members(self, schema: Mapping[str, Any]) -> str:
        """Matches an object's members, in the order of its properties; no others, if it has any."""
        self._check(schema)
        properties, required = _field(schema, "properties", dict), _field(schema, "required", list)
        if not properties:
            others = schema.get("additionalProperties", True)
            if others is False:
                return '""'
            if not isinstance(others, Mapping) or not others:
                return "any_members"
            member = self._rule(f'ANY_KEY ":" {self._value(others)}')
            return f'({member} ("," {member})*)?'
        first, following = "", ""  # of the properties from one on: where none stands before them, and where one does
        for name, inner in reversed(properties.items()):
            key = name if _BARE_KEY.fullmatch(name) else f"{self._quote}{name}{self._quote}"
            member = self._rule(f"{self._literal(key + ':')} {self._value(inner)}")
            after = self._rule(following) if following else ""
            if name in required:
                first, following = f"{member} {after}", f'"," {member} {after}'
            else:
                first = f"({member} {after} | {first})" if first else f"({member} {after})?"
                following = f'("," {member})? {after}'
        return first

    def _value(self, schema: Any) -> str:
        """Matches one value."""
        if schema is False:
            raise GrammarError("a schema in it is false, which no value matches")
        if not isinstance(schema, Mapping):
            return "any_value"
        self._check(schema)
        if "$ref" in schema:
            return self._definition(schema["$ref"])
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else _field(schema, "enum", list)
            return f"({' | '.join(self._literal(self._written(value)) for value in values)})"
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: value for key, value in schema.items() if key != keyword}
                parts = [
                    {**rest, **part} if isinstance(part, Mapping) else part for part in _field(schema, keyword, list)
                ]
                return f"({' | '.join(map(self._value, parts))})"
        types = schema.get("type")
        if isinstance(types, list):
            return f"({' | '.join(self._value({**schema, 'type': kind}) for kind in types)})"
        if types is None:
            types = next((kind for keyword, kind in _BY_KEYWORD if keyword in schema), None)
        if types is None:
            return "any_value"
        return self._of_type(types, schema)

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return "quoted"
        if kind == "object":
            return self._rule(f'"{{" {self._members(schema)} "}}"')
        if kind == "array":
            return self._rule(f'"[" {self._items(schema)} "]"')
        return self._refer(of_json_schema(dict(schema), strict=self._tool.strict))

    def _items(self, schema: Mapping[str, Any]) -> str:
        item = self._rule(self._value(schema.get("items", True)))
        low, high = _field(schema, "minItems", int), _field(schema, "maxItems", int) if "maxItems" in schema else None
        if high is not None and high < max(low, 1):
            return '""'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return f"{item} {more}" if low else f"({item} {more})?"

    def _definition(self, reference: object) -> str:
        """Returns the name of a definition's rule."""
        found = _DEFINITION.fullmatch(reference) if isinstance(reference, str) else None
        definitions = _field(self._tool.parameters, found[1], dict) if found else {}
        if found is None or found[2] not in definitions:
            raise GrammarError(f"$ref is {reference!r}: only those to $defs and definitions of the schema are known")
        if found[0] not in self._definitions:
            self._definitions[found[0]] = len(self._rules)
            self._pending.append((len(self._rules), definitions[found[2]]))
            self._rules.append("")
        return f"part{self._definitions[found[0]]}"

    def _check(self, schema: Mapping[str, Any]) -> None:
        if self._tool.strict and (unsupported := sorted(_UNSUPPORTED & schema.keys())):
            raise GrammarError(f"{unsupported[0]} is not enforced in this model's calls: leave it out, or strict")

    def _literal(self, text: str) -> str:
        return literal(text, self._special_tokens)

    def _written(self, value: Any) -> str:
        """Returns a value as the family writes it."""
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._written(inner)}" for key, inner in value.items()) + "}"
        return json.dumps(value)


def _field(schema: Mapping[str, Any], keyword: str, kind: type) -> Any:
    """Returns the value of a keyword, an empty one if it is missing. Raises GrammarError if it has another type."""
    value = schema.get(keyword, kind())
    if not isinstance(value, kind):
        raise GrammarError(f"{keyword} of a schema must be of type {kind.__name__}")
    return value
