"""Builds rules of Lark for the arguments of one call, by the function's schema, in each of the formats' styles."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.tool_format import ArgumentStyle, QuotedArguments, TaggedArguments
from mini_infer_engine.parsing.value_types import is_text, value_types
from mini_infer_engine.structured.grammar import (
    Grammar,
    Whitespace,
    literal,
    of_json_object,
    of_json_schema,
    text_up_to,
)
from mini_infer_engine.structured.quoted_arguments import QuotedMembers, quoted_rules

Refer = Callable[[Grammar], str]
"""Adds a grammar to the one that is being made; returns its name in rules."""

_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_BLANKS = Whitespace(pattern=r" |\n[\x20\x09]{0,64}")
"""Whitespace in arguments as models are shown them: on one line, or a line for each."""


def shared_rules(style: ArgumentStyle, special_tokens: Mapping[str, int]) -> str:
    """Returns the rules that those of arguments refer to, in addition to TEXT."""
    if isinstance(style, TaggedArguments):
        return text_up_to("text_value", style.after_value, special_tokens)
    return quoted_rules(style.quote, special_tokens) if isinstance(style, QuotedArguments) else ""


class Arguments:
    """The arguments of one tool."""

    def __init__(
        self,
        tool: Tool,
        refer: Refer,
        special_tokens: Mapping[str, int],
        rules: list[str],
        *,
        checks_schema: bool,
    ) -> None:
        """Adds rules of parts to `rules`. If `checks_schema` is False, any arguments are allowed."""
        self._tool = tool
        self._refer = refer
        self._special_tokens = special_tokens
        self._rules = rules
        self._checks_schema = checks_schema

    def expression(self, style: ArgumentStyle) -> str:
        """Returns the right side of a rule in one of the styles."""
        if isinstance(style, TaggedArguments):
            return self._tagged(style)
        if isinstance(style, QuotedArguments):
            return self._quoted(style)
        return self._json() if style == "json" else self._python()

    def _json(self) -> str:
        if not self._checks_schema:
            return self._refer(of_json_object(_BLANKS))
        return self._value({"type": "object"} | self._tool.parameters)

    def _value(self, schema: Any) -> str:
        """Matches a JSON text that the schema validates; it may refer to definitions of the whole schema."""
        if not isinstance(schema, dict):
            return self._refer(of_json_schema(schema, strict=self._tool.strict, whitespace=_BLANKS))
        whole = self._tool.parameters
        shared: dict[str, Any] = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
        return self._refer(of_json_schema(shared | schema, strict=self._tool.strict, whitespace=_BLANKS))

    def _properties(self) -> Iterator[tuple[str, Any, bool]]:
        """Yields names in order, their schemas, and True if they are required."""
        properties = self._tool.parameters.get("properties", {})
        required = self._tool.parameters.get("required", ())
        return ((name, schema, name in required) for name, schema in properties.items())

    def _tagged(self, style: TaggedArguments) -> str:
        if not self._checks_schema:
            before, after = (literal(text, self._special_tokens) for text in (style.before_key, style.after_key))
            return f"({before} {_ANY_KEY} {after} text_value)*"
        parts = []
        for name, schema, is_required in self._properties():
            before = literal(style.before_key + name + style.after_key, self._special_tokens)
            value = self._tagged_value(schema, literal(style.after_value, self._special_tokens))
            parts.append(f"({before} {value}){'' if is_required else '?'}")
        return " ".join(parts)

    def _tagged_value(self, schema: Any, end: str) -> str:
        """Matches a value and its end. Strings have no quotes, also where only some are allowed."""
        if not is_text(value_types(schema)):
            return f"{self._value(schema)} {end}"
        known = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
        texts = ["null" if value is None else value for value in known]
        return f"({' | '.join(map(literal, texts))}) {end}" if texts else "text_value"

    def _quoted(self, style: QuotedArguments) -> str:
        if not self._checks_schema:
            return "any_members"
        return QuotedMembers(self._tool, style.quote, self._special_tokens, self._refer, self._rules).expression()

    def _python(self) -> str:
        if not self._checks_schema:
            any_value = f'{_ANY_KEY} "=" {self._refer(of_json_schema(True, whitespace=_BLANKS))}'
            return f'({any_value} (", " {any_value})*)?'
        first, following = "", ""  # of the properties from one on: where none stands before them, and where one does
        for name, schema, is_required in reversed(list(self._properties())):
            value = f"{literal(name + '=')} {self._value(schema)}"
            if is_required:
                first, following = f"{value} {following}", f'", " {value} {following}'
            else:
                first = f"({value} {following} | {first})" if first else f"({value} {following})?"
                following = f'(", " {value})? {following}'
        return first
