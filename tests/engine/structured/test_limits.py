"""Limits on what a client may have enforced, as far as they are seen without compiling."""

from functools import reduce
from typing import Any

import pytest

from mini_infer_engine.structured import limits
from mini_infer_engine.structured.grammar import Whitespace, of_choice, of_json_schema, of_lark_or_gbnf, of_regex
from mini_infer_engine.structured.limits import (
    MAX_DEFINITIONS,
    MAX_ENUM_VALUES,
    MAX_LITERAL_CHARACTERS,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PROPERTIES,
    MAX_RULE_DEPTH,
    MAX_RULES,
    MAX_SCHEMA_DEPTH,
    GrammarError,
)
from mini_infer_engine.structured.structural_tag import of_structural_tag
from tests.support.hostile_grammars import LINKS, PRIME, chain, costly, rules_in_a_row

LONG = "x" * (MAX_LITERAL_CHARACTERS + 1)


def _properties(count: int, required: int = 0) -> dict[str, Any]:
    names = [f"p{index}" for index in range(count)]
    return {"type": "object", "properties": {name: {} for name in names}, "required": names[:required]}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_schema_depth_is_counted_through_references(link: Any) -> None:
    of_json_schema(chain(link, MAX_SCHEMA_DEPTH // 2 - 1))
    with pytest.raises(GrammarError, match=str(MAX_SCHEMA_DEPTH)):
        of_json_schema(chain(link, MAX_SCHEMA_DEPTH + 1))


@pytest.mark.parametrize("length", [1, 2, 50])
def test_circular_definitions_count_once(length: int) -> None:
    definitions = {
        f"d{index}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{(index + 1) % length}"}}}
        for index in range(length)
    }
    of_json_schema({"$defs": definitions, "$ref": "#/$defs/d0"})


def test_schema_depth_is_the_longest_path_when_definitions_are_shared() -> None:
    """Each refers twice to the next: as many ways as no walk could follow one by one."""
    definitions = {f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(40)}
    of_json_schema({"$defs": definitions | {"d40": {}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        (_properties(MAX_OPTIONAL_PROPERTIES + 1), MAX_OPTIONAL_PROPERTIES),
        (_properties(MAX_PROPERTIES + 1, MAX_PROPERTIES + 1), MAX_PROPERTIES),
        ({"$defs": {f"d{index}": {} for index in range(MAX_DEFINITIONS + 1)}}, MAX_DEFINITIONS),
        ({"definitions": {f"d{index}": {} for index in range(MAX_DEFINITIONS + 1)}}, MAX_DEFINITIONS),
        ({"enum": list(range(MAX_ENUM_VALUES + 1))}, MAX_ENUM_VALUES),
        ({"anyOf": [{"enum": list(range(MAX_ENUM_VALUES // 2 + 1))}, {"enum": [None] * 15_000}]}, MAX_ENUM_VALUES),
        (costly(PRIME), "multipleOf"),
        ({"multipleOf": 0.0123456789}, "multipleOf"),
        ({"multipleOf": 10**5000 + 1}, "multipleOf"),
        ({"minimum": 10**5000}, "digits"),
        ({"properties": {"a": {"items": costly(PRIME)}}}, "multipleOf"),
        ({"$ref": "#/x/y", "x": {"y": costly(PRIME)}}, "multipleOf"),
        ({"type": "string", "pattern": LONG}, "a pattern"),
        ({"enum": ["a", LONG]}, "enum"),
        ({"const": LONG}, "const"),
        ({"properties": {LONG: {}}}, "properties"),
        ({"patternProperties": {LONG: {}}}, "patternProperties"),
    ],
)  # fmt: skip
def test_a_schema_is_refused_when_it_exceeds_a_limit(schema: dict[str, Any], limit: object) -> None:
    with pytest.raises(GrammarError, match=str(limit)):
        of_json_schema(schema)


@pytest.mark.parametrize(
    ("regex", "length"),
    [
        ("abc", 3),
        ("a{3}b", 4),
        ("(ab){2,9}c", 5),
        ("((ab){10}c){10}", 210),
        (r"[a-z\]]{4}\d{2}\p{L}{3}\{5", 11),
        ("(a|b){0,5}", 2),
        ("a{,3}", 5),
        ("[]a]{2}", 2),
        ("((x{1000}){1000}){1000}", 10**9),
        ("x{99999999999999999999}", 999_999_999_999),
        (")(", 1),
    ],
)
def test_regex_length_counts_repetitions(regex: str, length: int) -> None:
    assert limits.regex_length(regex) == length


@pytest.mark.parametrize(
    "build",
    [
        lambda: of_choice([f"{LONG[:8000]}{index}" for index in range(5)]),
        lambda: of_json_schema({"items": {"enum": [f"{LONG[:8000]}{index}" for index in range(5)]}}),
        lambda: of_regex("z{20}((ab){100}){50}"),
        lambda: of_json_schema({"type": "array", "prefixItems": [{}, {"pattern": "^((ab){100}){50}$"}]}),
        lambda: of_json_schema({"patternProperties": {"^((ab){100}){50}$": {}}}),
        lambda: of_json_schema({}, whitespace=Whitespace(pattern="( {100}){100}")),
        lambda: of_lark_or_gbnf("start: /(x{100}){100}/"),
        lambda: of_lark_or_gbnf("start: " + " ".join([f'"{LONG[:8000]}"'] * 10)),
        lambda: of_lark_or_gbnf(f'start: "a" T\nT: {" ".join(["A"] * 50)}\nA: "{LONG[:8000]}"'),
        lambda: of_lark_or_gbnf(f'start: "a" T\nT: A~50\nA: "{LONG[:8000]}"'),
        lambda: of_lark_or_gbnf(f'start: "a" "{LONG[:8000]}"{{50}}'),
    ],
)  # fmt: skip
def test_a_schema_is_refused_when_repetition_makes_a_long_constant(build: Any) -> None:
    """The library writes it out, for seconds, when an output comes to it."""
    with pytest.raises(GrammarError, match=r"at most|longer than"):
        build()


@pytest.mark.parametrize(
    "schema",
    [
        _properties(MAX_OPTIONAL_PROPERTIES + 500, 500),
        {"multipleOf": 10**300},
        {"multipleOf": 1e-7},
        {"multipleOf": 0},
        {"multipleOf": float("inf")},
        {"multipleOf": "odd"},
        {"multipleOf": True},
        {"required": 5, "properties": 7, "enum": {}, "items": 3, "$ref": 3, "allOf": {}},
        {"$ref": "#/$defs/a/9/~1x"},
        {"required": [[], {}]},
    ],
)
def test_a_schema_is_left_to_the_library_when_it_is_within_limits(schema: dict[str, Any]) -> None:
    of_json_schema(schema)


@pytest.mark.parametrize(
    ("grammar", "limit"),
    [
        (rules_in_a_row(MAX_RULE_DEPTH + 2), MAX_RULE_DEPTH),
        ("root ::= r0\n" + rules_in_a_row(MAX_RULE_DEPTH + 2).replace(":", " ::=").partition("\n")[2], MAX_RULE_DEPTH),
        ("\n".join(["start: r0", *(f'r{index}: "a"' for index in range(MAX_RULES))]), MAX_RULES),
        (f'start: "{LONG}"', MAX_LITERAL_CHARACTERS),
        (f"start: /{LONG}/", MAX_LITERAL_CHARACTERS),
    ],
)
def test_a_lark_grammar_is_refused_when_it_exceeds_a_limit(grammar: str, limit: int) -> None:
    with pytest.raises(GrammarError, match=str(limit)):
        of_lark_or_gbnf(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: start "a" | "a"',
        'start: "r1: r2" /r2: r3/ r1 // r2\nr1: "x" # r9',
        "\n".join(["start: r0", *(f'r{index}: "a" start?' for index in range(1000))]),
        rules_in_a_row(MAX_RULE_DEPTH - 2),
    ],
)
def test_recursive_rules_and_text_do_not_count_against_limits(grammar: str) -> None:
    of_lark_or_gbnf(grammar)


def test_long_texts_are_refused_in_every_kind_of_grammar() -> None:
    for build in (
        lambda: of_regex(LONG),
        lambda: of_choice(["a", LONG]),
        lambda: of_structural_tag({"type": "structural_tag", "format": {"type": "const_string", "value": LONG}}),
    ):
        with pytest.raises(GrammarError, match=str(MAX_LITERAL_CHARACTERS)):
            build()


def test_schema_checks_do_not_recurse() -> None:
    deep: Any = reduce(lambda inner, _: {"not": inner}, range(20_000), {})
    with pytest.raises(GrammarError, match=str(MAX_SCHEMA_DEPTH)):
        limits.check_schema(deep)
