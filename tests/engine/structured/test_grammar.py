from functools import reduce
from typing import Any

import pytest

from mini_infer_engine.dry.vocabulary import TURN_START_ID
from mini_infer_engine.structured.grammar import (
    Grammar,
    Whitespace,
    after_thinking,
    literal,
    of_choice,
    of_json_object,
    of_json_schema,
    of_lark,
    of_lark_or_gbnf,
    of_regex,
)
from mini_infer_engine.structured.limits import MAX_JSON_DEPTH, GrammarError
from tests.support.grammars import accepts

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ONE_OF = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
THINKING = after_thinking(of_choice(["yes", "no"]), "</think>")
WITHOUT_CALLS = after_thinking(of_choice(["yes", "no"]), "</think>", call_marker="<call>")
MANY = [f"choice {number}" for number in range(8000)]
GBNF = 'root ::= "a" digit*\ndigit ::= [0-9]'


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (of_json_object(), ['{"a": [1, {}]}', "{}"], ["[]", '{"a": }', "{", ""]),
        (of_json_schema(POINT), ['{"x": 12}', '{"x":1,"y":null}'], ['{"x": "a"}', "{}"]),
        (of_json_schema(POINT, allows_additional_properties=False), ['{"x":1}'], ['{"x":1,"y":2}']),
        (of_json_schema(POINT, whitespace=Whitespace(is_allowed=False)), ['{"x":1}'], ['{"x": 1}']),
        (of_json_schema(POINT, whitespace=Whitespace(pattern="[ ]{1,2}")), ['{"x":  1}'], ['{"x":   1}', '{"x":\n1}']),
        (of_json_schema(True), ["1", "[null]"], ["x"]),
        (of_json_schema(ONE_OF), ["1", "1.5"], ["true"]),
        (of_json_schema({"type": "array", "uniqueItems": True}, strict=False), ["[1, 1]"], ["{}"]),
        (of_json_schema({"type": "integer", "x-guidance": {"lenient": True}}), ["1"], ["1.5"]),
        (of_regex(r"[a-c]{2}/\d"), ["ab/7"], ["ab/", "ad/7", "ab/77"]),
        (of_regex("^a+$"), ["aa"], ["b", ""]),
        (of_regex("a\nb"), ["a\nb"], ["ab"]),
        (of_choice(["yes", "no", "yes"]), ["yes", "no"], ["ye", "yesno", ""]),
        (of_choice(['a"b\\', "é😀", "\x01\x7f\n"]), ['a"b\\', "é😀", "\x01\x7f\n"], ["a"]),
        (of_choice(["", "x"]), ["", "x"], ["xx"]),
        (of_choice(MANY), ["choice 1", "choice 12", "choice 7999"], ["choice", "choice 8000", ""]),
        (of_choice(["", *MANY]), ["", "choice 12"], ["choice", "choice 8000"]),
        (of_lark_or_gbnf(GBNF), ["a", "a12"], ["12", "ab"]),
        (of_lark_or_gbnf('start: "a" DIGIT*\nDIGIT: /[0-9]/'), ["a", "a12"], ["12"]),
        (THINKING, ["</think>yes", "hm, no\n</think>\n\nno"], ["yes", "hm</think>hm", "hm</think>"]),
        (WITHOUT_CALLS, ["</think>yes", "I call <cal\n</think>\nno"], ["a <call></think>yes", "<call> x</think>no"]),
        (of_lark('start: "<" @a @b ">"', a=of_regex("x+"), b=of_choice(["1", "2"])), ["<x1>", "<xx2>"], ["<1>", "<x>"]),
        (of_lark("start: @a @a", a=THINKING), ["a</think>yesb</think>no"], ["a</think>yes"]),
    ],
)  # fmt: skip
def test_a_grammar_accepts_exactly_its_language(grammar: Grammar, yes: list[str], no: list[str]) -> None:
    assert [accepts(grammar, text) for text in yes] == [True] * len(yes)
    assert [accepts(grammar, text) for text in no] == [False] * len(no)


def test_a_special_token_marker_matches_the_token_and_not_its_text() -> None:
    special = {"<|im_start|>": TURN_START_ID}
    grammar = after_thinking(of_choice(["yes"]), "<|im_start|>", special)
    assert accepts(grammar, [*b"hm", TURN_START_ID, *b"yes"])
    assert not accepts(grammar, "hm<|im_start|>yes")
    message_part = of_lark(f"start: {literal('a<|im_start|>b', special)}")
    assert accepts(message_part, [ord("a"), TURN_START_ID, ord("b")])
    assert not accepts(message_part, "a<|im_start|>b")


@pytest.mark.parametrize(
    ("build", "message_part"),
    [
        (lambda: of_json_schema(False), "false"),
        (lambda: of_json_schema(_nested(MAX_JSON_DEPTH + 1)), f"deeper than {MAX_JSON_DEPTH}"),
        (lambda: of_json_schema(_nested(100_000)), f"deeper than {MAX_JSON_DEPTH}"),
        (lambda: of_choice([]), "at least one"),
        (lambda: of_lark_or_gbnf('root ::= "a'), "neither Lark nor GBNF"),
        (lambda: of_lark_or_gbnf("root ::= " + "(" * 100_000), "nests too deeply"),
    ],
)
def test_a_grammar_is_refused_when_no_output_can_match_it(build: Any, message_part: str) -> None:
    with pytest.raises(GrammarError, match=message_part):
        build()


def _nested(depth: int) -> dict[str, Any]:
    return reduce(lambda inner, _: {"not": inner}, range(depth), {})


def test_closing_objects_does_not_change_property_names_and_values() -> None:
    schema = {
        "type": "object",
        "properties": {"properties": {"type": "object", "properties": {}}, "any": {"type": "object"}},
        "required": ["properties"],
    }
    grammar = of_json_schema(schema, allows_additional_properties=False)
    assert accepts(grammar, '{"properties":{},"any":{"x":1}}')
    assert not accepts(grammar, '{"properties":{"x":1}}')
    const = of_json_schema({"const": {"properties": {}}}, allows_additional_properties=False)
    assert accepts(const, '{"properties":{}}')


def test_json_whitespace_is_bounded() -> None:
    for text in ('{"a": [1, 2]}', '{"a":[1,2]}', '{\n  "a": [\n    1,\r\n\t2\n  ]\n}', "{\n" + " " * 32 + "}"):
        assert accepts(of_json_object(), text), text
    for text in ("{  }", "{\n\n}", "{\n" + " " * 33 + "}", "{ \n}"):
        assert not accepts(of_json_object(), text), text
