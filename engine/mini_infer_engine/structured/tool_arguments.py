"""Builds rules of Lark for the arguments of one call, by the function's schema, in each of the formats' styles."""

from collections.abc import Callable, Iterator
from typing import Any

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.structured.grammar import Grammar, Whitespace, literal, of_json_object, of_json_schema

Refer = Callable[[Grammar], str]
"""Adds a grammar to the one that is being made; returns its name in rules."""

_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_PARAMETER_END = "\n</parameter>\n"
_BLANKS = Whitespace(pattern=r" |\n[\x20\x09]{0,64}")
"""Whitespace in arguments as models are shown them: on one line, or a line for each."""
SHARED_RULES = f"xml_text[lazy]: TEXT {literal(_PARAMETER_END)}\n"
"""Rules that those of arguments refer to, in addition to TEXT."""


class Arguments:
    """The arguments of one tool."""

    def __init__(self, tool: Tool, refer: Refer, *, checks_schema: bool) -> None:
        """Stores the tool. If `checks_schema` is False, any arguments are allowed."""
        self._tool = tool
        self._refer = refer
        self._checks_schema = checks_schema

    def expression(self, style: str) -> str:
        """Returns the right side of a rule in one of the styles of `ToolCallFormat.arguments`."""
        return {"json": self._json, "xml": self._xml, "python": self._python}[style]()

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

    def _xml(self) -> str:
        if not self._checks_schema:
            return f'("<parameter=" {_ANY_KEY} ">\\n" xml_text)*'
        parts = []
        for name, schema, is_required in self._properties():
            is_text = (
                isinstance(schema, dict) and schema.get("type") == "string" and not schema.keys() & {"enum", "const"}
            )
            value = "xml_text" if is_text else f"{self._xml_value(schema)} {literal(_PARAMETER_END)}"
            parts.append(f"({literal(f'<parameter={name}>' + chr(10))} {value}){'' if is_required else '?'}")
        return " ".join(parts)

    def _xml_value(self, schema: Any) -> str:
        """Matches a value. Strings have no quotes, also where only some are allowed."""
        values = (
            schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
        )
        if values and all(isinstance(value, str) for value in values):
            return f"({' | '.join(map(literal, values))})"
        return self._value(schema)

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
