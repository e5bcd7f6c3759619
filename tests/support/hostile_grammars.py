"""Grammars that clients send to do harm, past the checks that need no compiler; and those that random clients send."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from mini_infer_engine.structured.grammar import Grammar

Schema = dict[str, Any]
OPTIONS = {"whitespace_flexible": True, "coerce_one_of": True, "lenient": False}
PRIME = 9_999_991


def unchecked(schema: Schema) -> Grammar:
    """A schema's grammar as it was made before there were limits."""
    return Grammar(json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": OPTIONS}}]}))


def unchecked_lark(lark: str) -> Grammar:
    return Grammar(json.dumps({"grammars": [{"lark_grammar": lark}]}))


LINKS: dict[str, Callable[[Schema], Schema]] = {
    "properties": lambda reference: {"type": "object", "properties": {"a": reference}},
    "items": lambda reference: {"type": "array", "items": reference},
    "anyOf": lambda reference: {"anyOf": [reference, {"type": "string"}]},
    "allOf": lambda reference: {"allOf": [reference, {"type": "integer"}]},
    "$ref": lambda reference: reference,
}
"""How one definition refers to the next."""


def chain(link: Callable[[Schema], Schema], length: int) -> Schema:
    """Definitions that refer to each other in a row."""
    definitions = {f"d{index}": link({"$ref": f"#/$defs/d{index + 1}"}) for index in range(length)}
    return {"$defs": definitions | {f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def rules_in_a_row(length: int) -> str:
    return "\n".join(["start: r0", *(f"r{index}: r{index + 1}" for index in range(length)), f'r{length}: "b"'])


def terminals_in_a_row(length: int) -> str:
    rows = (f'T{index}: "a" T{index + 1} "c"' for index in range(length))
    return "\n".join(["start: T0", *rows, f'T{length}: "b"'])


def costly(number: int) -> Schema:
    """A schema of 200 bytes that takes seconds and hundreds of megabytes."""
    return {"type": "integer", "multipleOf": number, "minimum": 0, "maximum": 1e30}


_numbers = st.one_of(st.integers(-(10**6), 10**6), st.sampled_from([PRIME, 99_991, 0.001, 1e30, 10**30, -1e30, 2**63]))
_sizes = st.sampled_from([0, 1, 7, 1000, 10**6, 10**9, 2**31])
_patterns = st.sampled_from(
    ["^a+$", "(a{1,1000}){1,1000}", "(.*a.{15}){10}", "(?=x)y", "[^\\s\\S]", "\\p{L}{1,200}", "(a|b|ab)*c", "^x_", "("]
)
_names = st.sampled_from(["a", "b", "x_a", "", "\x00", "é"])


def schemas() -> st.SearchStrategy[Schema]:
    """Schemas of random keywords whose `$ref`s make random graphs of four definitions."""
    leaves = st.one_of(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["integer", "number"])},
            optional={"multipleOf": _numbers, "minimum": _numbers, "maximum": _numbers, "exclusiveMinimum": _numbers},
        ),
        st.fixed_dictionaries(
            {"type": st.just("string")},
            optional={
                "pattern": _patterns,
                "minLength": _sizes,
                "maxLength": _sizes,
                "format": st.sampled_from(["date", "path", "uuid", "ipv6", "x" * 300]),
            },
        ),
        st.builds(lambda index: {"$ref": f"#/$defs/d{index}"}, st.integers(0, 4)),
        st.builds(lambda count: {"enum": [f"value {index}" for index in range(count)]}, st.integers(0, 300)),
        st.just({}),
    )

    def nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
        return st.one_of(
            st.fixed_dictionaries(
                {"type": st.just("object"), "properties": st.dictionaries(_names, inner, max_size=4)},
                optional={
                    "required": st.lists(_names, max_size=3),
                    "additionalProperties": st.one_of(st.booleans(), inner),
                    "patternProperties": st.dictionaries(_patterns, inner, max_size=2),
                    "minProperties": _sizes,
                },
            ),
            st.fixed_dictionaries(
                {"type": st.just("array"), "items": inner}, optional={"minItems": _sizes, "maxItems": _sizes}
            ),
            st.builds(
                lambda keyword, schemas: {keyword: schemas},
                st.sampled_from(["anyOf", "allOf", "oneOf"]),
                st.lists(inner, max_size=4),
            ),
        )

    tree = st.recursive(leaves, nested, max_leaves=12)
    return st.builds(
        lambda root, definitions: root | {"$defs": {f"d{index}": one for index, one in enumerate(definitions)}},
        tree,
        st.lists(tree, min_size=4, max_size=4),
    )
