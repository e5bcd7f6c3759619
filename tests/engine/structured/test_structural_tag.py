from typing import Any

import pytest

from mini_infer_engine.structured.grammar import Whitespace
from mini_infer_engine.structured.limits import GrammarError
from mini_infer_engine.structured.structural_tag import of_structural_tag
from tests.support.grammars import accepts

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
A = {"type": "tag", "begin": "<a>", "content": INTEGER, "end": "</a>"}
B = {"type": "tag", "begin": "<b>", "content": {"type": "regex", "pattern": "[xy]+"}, "end": ["</b>", "<e>"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [A, B]}
SEPARATED = {"type": "tags_with_separator", "tags": [A, B], "separator": ","}
Z = {"type": "const_string", "value": "z"}


def test_older_structural_tags_are_free_text_with_structures_at_triggers() -> None:
    tag = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "array", "items": {"type": "string"}}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    grammar = of_structural_tag(tag)
    for text in ("no call", "", 'so <f=a>12</f> and <f=b>["x"]</f>.', "<f=a>1</f>", "<f is no trigger"):
        assert accepts(grammar, text), text
    for text in ("<f=c>", "<f=a>x</f>", "<f=a>1", "<f=a>1</g>"):
        assert not accepts(grammar, text), text
    assert not accepts(of_structural_tag(tag, Whitespace(is_allowed=False)), '<f=b>["x", "y"]</f>')


@pytest.mark.parametrize(
    ("tree", "yes", "no"),
    [
        (INTEGER, ["12"], ["x"]),
        (ANY, ["", "anything\n"], []),
        (ANY | {"excludes": ["bad", "worse"]}, ["good", "ba"], ["so bad", "worse!"]),
        (A, ["<a>1</a>"], ["<a>x</a>", "1"]),
        (B, ["<b>xy</b>", "<b>x<e>"], ["<b></b>"]),
        (A | {"content": ANY}, ["<a>x < y</a>"], ["<a>x", "<a></a>x"]),
        (A | {"content": ANY | {"excludes": ["x"]}, "end": ["1", "2"]}, ["<a>yy1", "<a>2"], ["<a>x1"]),
        ({"type": "sequence", "elements": [ANY, Z, INTEGER]}, ["abz1", "z1"], ["ab1", "abz"]),
        ({"type": "sequence", "elements": [Z, ANY]}, ["z", "zab"], ["ab"]),
        ({"type": "or", "elements": [Z, INTEGER]}, ["z", "7"], ["z7", ""]),
        ({"type": "grammar", "grammar": 'root ::= "q"+'}, ["qq"], [""]),
        ({"type": "optional", "content": Z}, ["", "z"], ["zz"]),
        ({"type": "plus", "content": Z}, ["z", "zz"], [""]),
        ({"type": "star", "content": Z}, ["", "zz"], ["a"]),
        ({"type": "repeat", "min": 1, "max": 2, "content": Z}, ["z", "zz"], ["", "zzz"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": Z}, ["zz", "zzzzz"], ["z"]),
        (TRIGGERED, ["", "hm <a>1</a><b>x</b> end"], ["<a>x</a>", "<b", "<bx"]),
        (TRIGGERED | {"at_least_one": True}, ["hm <a>1</a>.", "<b>x</b>"], ["", "hm"]),
        (TRIGGERED | {"stop_after_first": True}, ["hm <a>1</a>", "hm"], ["<a>1</a>."]),
        (TRIGGERED | {"excludes": ["!"]}, ["hm <a>1</a>"], ["hm! <a>1</a>", "<a>1</a>!"]),
        (SEPARATED, ["", "<a>1</a>", "<a>1</a>,<b>x</b>"], ["<a>1</a><b>x</b>", "hm"]),
        (SEPARATED | {"at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "<a>1</a>,<b>x</b>"]),
    ],
)  # fmt: skip
def test_a_structural_tag_accepts_exactly_its_language(tree: Any, yes: list[str], no: list[str]) -> None:
    grammar = of_structural_tag({"type": "structural_tag", "format": tree})
    for text in yes:
        assert accepts(grammar, text), text
    for text in no:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("tag", "message_part"),
    [
        ("text", "is an object"),
        ({}, "format is missing"),
        ({"format": {"type": "x"}}, "format.type is 'x'"),
        ({"format": {"type": ["x"]}}, r"format.type is \['x'\]"),
        ({"format": {"type": "optional", "content": None}}, "format.content is no object"),
        ({"format": A | {"begin": 1}}, "format.begin is missing"),
        ({"format": A | {"end": 1}}, "format.end"),
        ({"format": INTEGER | {"style": "qwen_xml"}}, "format.style"),
        ({"format": INTEGER | {"json_schema": 1}}, "format.json_schema is no schema"),
        ({"format": {"type": "sequence", "elements": [ANY, INTEGER]}}, r"format.elements\[0\]: any_text must be"),
        ({"format": TRIGGERED | {"triggers": ["<x"]}}, r"format.tags\[0\].begin is '<a>'"),
        ({"format": TRIGGERED | {"tags": []}}, "at least one tag"),
        ({"format": {"type": "or", "elements": []}}, "is empty"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": Z}}, "from 3 to 2"),
        ({"structures": [{"begin": "<a>", "end": 1}], "triggers": ["<"]}, r"structures\[0\].end"),
        ({"structures": [], "triggers": ["<"]}, "at least one tag"),
        ({"format": {"type": "optional", "content": {}}}, "format.content.type is None"),
    ],
)
def test_the_error_names_the_place_when_a_structural_tag_is_invalid(tag: object, message_part: str) -> None:
    with pytest.raises(GrammarError, match=message_part):
        of_structural_tag(tag)


def test_a_structural_tag_is_refused_when_it_is_too_deep() -> None:
    tree: dict[str, Any] = Z
    for _ in range(5000):
        tree = {"type": "optional", "content": tree}
    with pytest.raises(GrammarError, match="deeper"):
        of_structural_tag({"format": tree})
