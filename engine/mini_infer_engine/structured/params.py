"""What a request says of its output's structure, in vLLM's words and OpenAI's, and the grammar that it asks for."""

import json as json_library
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mini_infer_engine.structured.grammar import (
    ANY_WHITESPACE,
    Grammar,
    Whitespace,
    after_thinking,
    of_choice,
    of_json_object,
    of_json_schema,
    of_lark_or_gbnf,
    of_regex,
)
from mini_infer_engine.structured.limits import GrammarError, check_size
from mini_infer_engine.structured.structural_tag import of_structural_tag

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of which exactly one is set."""


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """To what an output is held: names and meanings are vLLM's. ValueError: none of the kinds is set, or several."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, or the text of one."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark as llguidance reads it, or GBNF (`root ::= ...`)."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Either shape of vLLM's `response_format` of type structural_tag, or its text."""
    disable_any_whitespace: bool = False
    """No blanks between the tokens of a JSON text."""
    disable_additional_properties: bool = False
    """JSON objects have the properties that their schema names, and no others."""
    whitespace_pattern: str | None = None
    """A regex for the blanks between the tokens of a JSON text."""

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(KINDS)}, and here is {found}")

    def to_grammar(self) -> Grammar:
        """GrammarError: what in it is at fault."""
        check_size(self.json, self.regex, self.choice, self.grammar, self.structural_tag)
        whitespace = Whitespace(not self.disable_any_whitespace, self.whitespace_pattern or Whitespace().pattern)
        if self.json is not None:
            schema = _parsed(self.json, "json")
            if not isinstance(schema, Mapping | bool):
                raise GrammarError("json is no schema: a schema is an object")
            may_add = not self.disable_additional_properties
            return of_json_schema(schema, whitespace=whitespace, allows_additional_properties=may_add)
        if self.regex is not None:
            return of_regex(self.regex)
        if self.choice is not None:
            return of_choice(self.choice)
        if self.grammar is not None:
            return of_lark_or_gbnf(self.grammar)
        if self.structural_tag is not None:
            return of_structural_tag(_parsed(self.structural_tag, "structural_tag"), whitespace)
        if not self.json_object:
            raise GrammarError("json_object is false: leave structured_outputs out, or set another kind")
        return of_json_object(whitespace)


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """A grammar that is still to be built, which may take long."""

    param: str
    """The field that asks for it."""
    build: Callable[[Mapping[str, int]], Grammar]
    """From the special tokens of the tokenizer, with their ids. GrammarError: what is at fault."""

    def after_thinking(self, end_marker: str, begin_marker: str = "", call_marker: str = "") -> "GrammarRequest":
        """The same for what follows the thinking; see `grammar.after_thinking`."""
        return GrammarRequest(
            self.param,
            lambda special: after_thinking(self.build(special), end_marker, special, begin_marker, call_marker),
        )


def of_structured_outputs(params: StructuredOutputsParams) -> GrammarRequest:
    """For the field `structured_outputs`."""
    return GrammarRequest("structured_outputs", lambda special: params.to_grammar())


def of_response_format(response_format: Mapping[str, Any]) -> GrammarRequest | None:
    """For OpenAI's field `response_format`, whose type has been checked; None: it asks for text."""
    kind = response_format["type"]
    if kind == "text":
        return None
    return GrammarRequest("response_format", lambda special: _of_response_format(kind, response_format))


def _of_response_format(kind: str, response_format: Mapping[str, Any]) -> Grammar:
    check_size(response_format)
    if kind == "json_object":
        return of_json_object()
    if kind == "structural_tag":
        return of_structural_tag(response_format, ANY_WHITESPACE)
    asked = response_format["json_schema"]
    schema = asked.get("schema")
    return of_json_schema({} if schema is None else schema, strict=asked.get("strict"))


def _parsed(value: object, name: str) -> object:
    """A JSON text as what it says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json_library.loads(value)
    except RecursionError:
        raise GrammarError(f"{name} nests too deeply") from None
    except ValueError as error:
        raise GrammarError(f"{name} is no JSON: {error}") from None
