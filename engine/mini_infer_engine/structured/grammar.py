"""Builds llguidance grammars of a request's output: from JSON schemas, regexes, choices and EBNF.

A grammar is a JSON document that llguidance reads (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
Builders are pure and check shapes and limits.py alone; checker.py determines if llguidance accepts the result.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mini_infer_engine.structured.limits import (
    GrammarError,
    check_json_depth,
    check_lark,
    check_literals,
    check_regex,
    check_schema,
)

TEXT = r"/(.|\n)*/"
"""Any text in Lark, including none. Special tokens are no text."""

_MOST_RULES = 256
"""Most alternatives that are rules of their own; more become one regex, since llguidance follows 2000 at most."""


class Grammar(msgspec.Struct, frozen=True, gc=False):
    """One llguidance grammar."""

    text: str
    """JSON text {"grammars": [...]}: the output begins with the first, the others are named by their contents."""
    param: str = "structured_outputs"
    """The request's field that specifies the grammar, for errors."""
    num_bytes: int = 0
    """Memory that the grammar takes, as measured by the checker; 0 before."""
    cpu_s: float = 0.0
    """CPU seconds that compiling takes, as measured by the checker."""


class Whitespace(msgspec.Struct, frozen=True):
    """The whitespace that is allowed between the tokens of a JSON text."""

    is_allowed: bool = True
    pattern: str = r"[ ]|\r?\n[ \t]{0,32}"
    """A regex for one run of whitespace: a blank, or a line end with indentation. Without a bound, a model that is not
    sure how to continue emits blanks forever.
    """


ANY_WHITESPACE = Whitespace()


def of_json_schema(
    schema: Mapping[str, Any] | bool,
    *,
    strict: bool | None = None,
    whitespace: Whitespace = ANY_WHITESPACE,
    allows_additional_properties: bool = True,
) -> Grammar:
    """Returns a grammar of JSON texts that the schema validates.

    `strict`: True raises if the schema cannot be enforced exactly; None treats `oneOf` as `anyOf` where the
    alternatives are not known to exclude each other; False also ignores keywords that are not implemented. If
    `allows_additional_properties` is False, objects that do not say otherwise have only the properties that they name.
    """
    check_json_depth(schema, "schema")
    check_schema(schema)
    if schema is False:
        raise GrammarError("the schema is false, which no JSON text matches")
    rules: Any = {} if schema is True else _rewritten(schema, allows_additional_properties)
    options: dict[str, Any] = {
        "whitespace_flexible": whitespace.is_allowed,
        "coerce_one_of": strict is not True,
        "lenient": strict is False,
    }
    if whitespace.is_allowed:
        check_regex(whitespace.pattern, "whitespace_pattern")
        options["whitespace_pattern"] = whitespace.pattern
    return _document({"json_schema": rules | {"x-guidance": options}})


def of_json_object(whitespace: Whitespace = ANY_WHITESPACE) -> Grammar:
    """Returns a grammar of JSON objects."""
    return of_json_schema({"type": "object"}, whitespace=whitespace)


def of_regex(pattern: str) -> Grammar:
    """Returns a grammar of texts that the regex matches as a whole, in the syntax of Rust's regex crate, without
    look-around.
    """
    check_regex(pattern, "the regex")
    return of_lark(f"start: {_regex(pattern)}")


def of_choice(choices: Sequence[str]) -> Grammar:
    """Returns a grammar of these texts."""
    if not choices:
        raise GrammarError("there is nothing to choose from: give at least one string")
    different = dict.fromkeys(choices)
    check_literals(different, "a choice")
    if len(different) <= _MOST_RULES:
        return of_lark("start: " + " | ".join(map(literal, different)))
    texts = [literal(text) for text in different if text]
    return of_lark(f"start: CHOICE{'?' if '' in different else ''}\nCHOICE: {' | '.join(texts)}")


def of_lark_or_gbnf(text: str) -> Grammar:
    """Returns a context-free grammar from llguidance's Lark or llama.cpp's GBNF (`root ::= ...`), which vLLM calls
    EBNF.
    """
    from llguidance.gbnf_to_lark import any_to_lark  # the rest of this module needs no library

    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise GrammarError("the grammar nests too deeply") from None
    except Exception as error:  # it raises what its parser happens to meet
        raise GrammarError(f"the grammar is neither Lark nor GBNF: {error}") from None
    check_lark(lark)
    return of_lark(lark)


def of_lark(lark: str, **inner: Grammar) -> Grammar:
    """Returns a Lark grammar, which may refer to each of `inner` as `@its_keyword`."""
    parts: dict[str, dict[str, Any]] = {}
    for keyword, grammar in inner.items():
        name = _name(grammar)
        first, *others = json.loads(grammar.text)["grammars"]
        parts[name] = {**first, "name": name}
        parts |= {other["name"]: other for other in others}
        lark = re.sub(rf"@{keyword}\b", f"@{name}", lark)
    return _document({"lark_grammar": lark}, *parts.values())


def after_thinking(
    grammar: Grammar,
    end_marker: str,
    special_tokens: Mapping[str, int] | None = None,
    begin_marker: str = "",
    call_marker: str = "",
) -> Grammar:
    """Returns a grammar of free text up to the marker that ends the thinking, then blanks, then the grammar.

    `special_tokens` are those of the tokenizer that are no text, with their ids; markers may be among them. With a
    `begin_marker`, the output may think after that marker, but need not; without, it begins within its thinking.
    `call_marker` begins a call, which would end the thinking as well, so it is forbidden within the thinking.
    """
    lark = f"TEXT: {TEXT}\nTHOUGHT: TEXT" + (f" & ~(TEXT {literal(call_marker)} TEXT)" if call_marker else "")
    if special_tokens and end_marker in special_tokens:
        lark = f"thinking: THOUGHT <[{special_tokens[end_marker]}]>\n{lark}"
    else:
        lark = f"thinking[suffix={literal(end_marker)}]: THOUGHT\n{lark}"
    start = f"({literal(begin_marker, special_tokens)} thinking blanks)?" if begin_marker else "thinking blanks"
    made = of_lark(f"start: {start} @answer\n{lark}\nblanks: BLANKS?\nBLANKS: /[ \\n]{{1,4}}/", answer=grammar)
    return msgspec.structs.replace(made, param=grammar.param)


def literal(text: str, special_tokens: Mapping[str, int] | None = None) -> str:
    """Returns a text as a Lark literal, in which special tokens are denoted by their ids."""
    if special_tokens:
        pattern = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        pieces = re.split(f"({pattern})", text)
        literals = [f"<[{special_tokens[piece]}]>" if piece in special_tokens else literal(piece) for piece in pieces]
        return " ".join(piece for piece in literals if piece != '""') or '""'
    return json.dumps(text).replace("\x7f", "\\u007f")


def text_up_to(name: str, end: str, special_tokens: Mapping[str, int]) -> str:
    """Returns rules of Lark by which `name` matches any text and the first `end` behind it. They refer to TEXT."""
    token = next((token for token in special_tokens if end.startswith(token)), None)
    if token is None:
        return f"{name}[lazy]: TEXT {literal(end)}\n"
    terminal = name.upper()  # a special token is no text, but may be spelled out in letters
    return f"{name}: {terminal} {literal(end, special_tokens)}\n{terminal}: TEXT & ~(TEXT {literal(token)} TEXT)\n"


def _regex(pattern: str) -> str:
    """Returns a regex as a Lark literal."""
    escaped = re.sub(r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.S)
    return f"/{escaped}/"


def _document(*parts: Mapping[str, Any]) -> Grammar:
    try:
        return Grammar(json.dumps({"grammars": parts}))
    except ValueError:
        raise GrammarError("a number in it has more digits than can be enforced") from None


def _name(grammar: Grammar) -> str:
    """Returns a name that depends on the contents alone, so that equal grammars have the same name."""
    return "g" + hashlib.sha256(grammar.text.encode()).hexdigest()[:16]


_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")


FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Values of `format` that llguidance enforces. In JSON Schema all others are annotations, which allow every string."""


def _rewritten(schema: Any, allows_additional_properties: bool) -> Any:
    """Returns the schema without formats that are annotations. If additional properties are not allowed, objects that
    do not say otherwise are limited to the properties that they name.
    """
    if isinstance(schema, list):
        return [_rewritten(item, allows_additional_properties) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    rewritten: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            rewritten[keyword] = {
                name: _rewritten(inner, allows_additional_properties) for name, inner in value.items()
            }
        elif keyword in _VALUES:
            rewritten[keyword] = value
        elif keyword != "format" or not isinstance(value, str) or value in FORMATS:
            rewritten[keyword] = _rewritten(value, allows_additional_properties)
    if not allows_additional_properties and ("properties" in rewritten or "patternProperties" in rewritten):
        rewritten.setdefault("additionalProperties", False)
    return rewritten
