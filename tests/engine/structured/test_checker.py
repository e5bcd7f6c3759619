import time
from contextlib import suppress

import pytest

from mini_infer_engine.structured import checker
from mini_infer_engine.structured.checker import GrammarChecker
from mini_infer_engine.structured.grammar import (
    MAX_CHARACTERS,
    GrammarError,
    of_choice,
    of_json_schema,
    of_lark,
    of_regex,
)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (of_json_schema({"type": "objekt"}), "objekt"),
        (of_json_schema({"type": "object", "if": {}, "then": {}}), '"if", "then"'),
        (of_json_schema({"type": "string", "pattern": "(?=x)a"}), "look-around"),
        (of_json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}, strict=True), "oneOf"),
        (of_json_schema({"$ref": "#/$defs/x"}), "defs/x"),
        (of_regex("(a"), "unclosed group"),
        (of_lark("start: @nowhere"), "nowhere"),
        (of_choice(["x" * MAX_CHARACTERS]), f"at most {MAX_CHARACTERS}"),
    ],
)
def test_what_llguidance_does_not_take_is_said(grammar: object, said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        GrammarChecker().check(grammar)  # type: ignore[arg-type]  # a table of grammars


def test_verdicts_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(checker, "_ask_library", lambda text: asked.append(text) or "")
    monkeypatch.setattr(checker, "REMEMBERED", 2)
    one, two, three = (of_choice([text]) for text in "abc")
    checks = GrammarChecker()
    for grammar in (one, two, one, three, one, two):
        checks.check(grammar)
    assert asked == [one.text, two.text, three.text, two.text]


HOSTILE = [
    of_json_schema({"enum": [f"value number {number}" for number in range(15_000)]}),
    of_json_schema({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}),
    of_json_schema({"type": "string", "pattern": "^(.*a.{15}){10}$"}),
    of_json_schema({"type": "array", "minItems": 10**6, "maxItems": 10**9}),
    of_json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(6)]} for i in range(9)]}
    ),
    of_regex("(a{1,1000}){1,1000}"),
    of_regex("(a?){5000}a{5000}"),
    of_regex("(.*a.{20}){30}"),
]


def test_hostile_grammars_take_a_bounded_time() -> None:
    for grammar in HOSTILE:
        started = time.process_time()
        with suppress(GrammarError):
            GrammarChecker().check(grammar)
        assert time.process_time() - started < 3
