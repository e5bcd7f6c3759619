"""Parses a request's structured output parameters, in vLLM's and OpenAI's formats, and builds their grammar."""

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
    """Constraints on an output; names and meanings are vLLM's. Raises ValueError unless exactly one of the kinds is
    set.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, or the text of one."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A grammar in llguidance's Lark, or in GBNF (`root ::= ...`)."""
    json_object: bool | None = None
    """True for any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Either shape of vLLM's `response_format` of type structural_tag, or its text."""
    disable_any_whitespace: bool = False
    """True to allow no blanks between the tokens of a JSON text."""
    disable_additional_properties: bool = False
    """True to limit JSON objects to the properties that their schema names."""
    whitespace_pattern: str | None = None
    """A regex for the blanks between the tokens of a JSON text."""

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(KINDS)}, and here is {found}")

    def to_grammar(self) -> Grammar:
        """Returns the grammar. Raises GrammarError if it cannot be built; the message says what is at fault."""
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
    """The field that specifies it."""
    build: Callable[[Mapping[str, int]], Grammar]
    """Builds the grammar from the tokenizer's special tokens, with their ids. Raises GrammarError if that is not
    possible.
    """

    def after_thinking(self, end_marker: str, begin_marker: str = "", call_marker: str = "") -> "GrammarRequest":
        """Returns a request for thinking that is followed by this grammar, as `grammar.after_thinking` builds it."""
        return GrammarRequest(
            self.param,
            lambda special: after_thinking(self.build(special), end_marker, special, begin_marker, call_marker),
        )


def of_structured_outputs(params: StructuredOutputsParams) -> GrammarRequest:
    """Returns the grammar request of the field `structured_outputs`."""
    return GrammarRequest("structured_outputs", lambda special: params.to_grammar())


def of_response_format(response_format: Mapping[str, Any]) -> GrammarRequest | None:
    """Returns the grammar request of OpenAI's `response_format`, None if it asks for text. Its type must be valid."""
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
    json_schema = response_format["json_schema"]
    schema = json_schema.get("schema")
    return of_json_schema({} if schema is None else schema, strict=json_schema.get("strict"))


def _parsed(value: object, name: str) -> object:
    """Returns the value of a JSON text, or any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json_library.loads(value)
    except RecursionError:
        raise GrammarError(f"{name} nests too deeply") from None
    except ValueError as error:
        raise GrammarError(f"{name} is no JSON: {error}") from None
