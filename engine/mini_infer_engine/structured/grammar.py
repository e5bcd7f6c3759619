"""What a request's output must look like, as one llguidance grammar: from JSON schemas, regexes, choices and EBNF.

A grammar is a JSON document that llguidance reads (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
Builders are pure and check shapes alone; whether llguidance takes the result is checker.py's to say.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

MAX_SCHEMA_DEPTH = 64
"""Of nested arrays and objects: deeper ones would exhaust the stack of whoever walks them."""
MAX_CHARACTERS = 500_000
"""Of a grammar's text: what it takes to compile grows with it."""

TEXT = r"/(.|\n)*/"
"""In Lark: any text, also none. Special tokens are no text."""

_MOST_RULES = 256
"""Alternatives that a parser follows beside each other; more are one regex, since llguidance follows 2000 at most."""


class GrammarError(ValueError):
    """A schema, regex or grammar that no output can be held to, and what in it is at fault."""


class Grammar(msgspec.Struct, frozen=True, gc=False):
    """One llguidance grammar."""

    text: str
    """{"grammars": [...]}: the first is where output begins, the others are named by their contents."""
    param: str = "structured_outputs"
    """The request's field that asks for it, for errors."""


class Whitespace(msgspec.Struct, frozen=True):
    """What may stand between the tokens of a JSON text."""

    is_allowed: bool = True
    pattern: str = r"[ ]|\r?\n[ \t]{0,32}"
    """A regex for one run of it: a blank, or a line end with indentation. Without a bound, a model that is not sure how
    to go on writes blanks for ever.
    """


ANY_WHITESPACE = Whitespace()


def of_json_schema(
    schema: Mapping[str, Any] | bool,
    *,
    strict: bool | None = None,
    whitespace: Whitespace = ANY_WHITESPACE,
    allows_additional_properties: bool = True,
) -> Grammar:
    """A JSON text that the schema validates.

    `strict`: True refuses what cannot be enforced exactly; None takes `oneOf` for `anyOf` where the alternatives are
    not known to exclude each other; False also ignores keywords that are not implemented.
    `allows_additional_properties` False: objects that do not say otherwise have only the properties that they name.
    """
    if nesting_depth(schema) > MAX_SCHEMA_DEPTH:
        raise GrammarError(f"the schema nests deeper than {MAX_SCHEMA_DEPTH} levels: flatten it, or use $ref")
    if schema is False:
        raise GrammarError("the schema is false, which no JSON text matches")
    rules: Any = {} if schema is True else dict(schema)
    if not allows_additional_properties:
        rules = _closed(rules)
    options: dict[str, Any] = {
        "whitespace_flexible": whitespace.is_allowed,
        "coerce_one_of": strict is not True,
        "lenient": strict is False,
    }
    if whitespace.is_allowed:
        options["whitespace_pattern"] = whitespace.pattern
    return _document({"json_schema": rules | {"x-guidance": options}})


def of_json_object(whitespace: Whitespace = ANY_WHITESPACE) -> Grammar:
    """Any JSON object."""
    return of_json_schema({"type": "object"}, whitespace=whitespace)


def of_regex(pattern: str) -> Grammar:
    """A text that the regex matches as a whole; syntax of Rust's regex crate, without look-around."""
    return of_lark(f"start: {_regex(pattern)}")


def of_choice(choices: Sequence[str]) -> Grammar:
    """One of these texts."""
    if not choices:
        raise GrammarError("there is nothing to choose from: give at least one string")
    different = dict.fromkeys(choices)
    if len(different) <= _MOST_RULES:
        return of_lark("start: " + " | ".join(map(literal, different)))
    texts = [literal(text) for text in different if text]
    return of_lark(f"start: CHOICE{'?' if '' in different else ''}\nCHOICE: {' | '.join(texts)}")


def of_lark_or_gbnf(text: str) -> Grammar:
    """A context-free grammar in llguidance's Lark or llama.cpp's GBNF (`root ::= ...`), which vLLM calls EBNF."""
    from llguidance.gbnf_to_lark import any_to_lark  # the rest of this module needs no library

    try:
        return of_lark(any_to_lark(text))
    except RecursionError:
        raise GrammarError("the grammar nests too deeply") from None
    except Exception as error:  # it raises what its parser happens to meet
        raise GrammarError(f"the grammar is neither Lark nor GBNF: {error}") from None


def of_lark(lark: str, **inner: Grammar) -> Grammar:
    """A Lark grammar, which may refer to each of `inner` as `@its_keyword`."""
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
    """Free text up to the marker that ends the thinking, then the grammar; blanks may stand between the two.

    `special_tokens`: those of the tokenizer that are no text, with their ids; markers may be among them.
    `begin_marker`: the output need not think, but may do so behind this; without, it begins within its thinking.
    `call_marker`: a call begins so, which would end the thinking as well; it does not stand within it.
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
    """A text as Lark says it; special tokens in it are said by their ids."""
    if special_tokens:
        pattern = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        pieces = re.split(f"({pattern})", text)
        said = [f"<[{special_tokens[piece]}]>" if piece in special_tokens else literal(piece) for piece in pieces]
        return " ".join(piece for piece in said if piece != '""') or '""'
    return json.dumps(text).replace("\x7f", "\\u007f")


def _regex(pattern: str) -> str:
    """A regex as Lark says it."""
    escaped = re.sub(r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.S)
    return f"/{escaped}/"


def _document(*parts: Mapping[str, Any]) -> Grammar:
    return Grammar(json.dumps({"grammars": parts}))


def _name(grammar: Grammar) -> str:
    """The same for equal grammars."""
    return "g" + hashlib.sha256(grammar.text.encode()).hexdigest()[:16]


def check_size(*values: object) -> None:
    """GrammarError: their texts are so long that no grammar that is made of them can be served, as is seen at once."""
    length, level = 0, list(values)
    while level:
        length += sum(len(item) for item in level if isinstance(item, str))
        level = [item for outer in level for item in _inside(outer)]
    if length > MAX_CHARACTERS:
        raise GrammarError(f"its texts have {length} characters; at most {MAX_CHARACTERS} can be served")


def nesting_depth(value: object) -> int:
    """Of arrays and objects in each other."""
    depth, level = 0, [value]
    while level:
        inside = [item for outer in level for item in _inside(outer)]
        depth, level = depth + 1, inside
    return depth


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()


_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")


def _closed(schema: Any) -> Any:
    """The same schema, whose objects have no other properties than those that they name."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            closed[keyword] = {name: _closed(inner) for name, inner in value.items()}
        else:
            closed[keyword] = value if keyword in _VALUES else _closed(value)
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
