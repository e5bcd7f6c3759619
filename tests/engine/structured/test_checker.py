import pytest

from mini_infer_engine.dry.vocabulary import dry_assets
from mini_infer_engine.structured import checker
from mini_infer_engine.structured.checker import GrammarChecker
from mini_infer_engine.structured.grammar import (
    Grammar,
    of_choice,
    of_json_schema,
    of_lark,
    of_regex,
)
from mini_infer_engine.structured.limits import MAX_CHARACTERS, GrammarError
from mini_infer_engine.structured.proving.messages import Proof
from mini_infer_engine.structured.proving.prover import Prover


@pytest.fixture(scope="module")
def grammars() -> GrammarChecker:
    return GrammarChecker(lambda: dry_assets().files["tokenizer.json"])


@pytest.mark.parametrize(
    ("grammar", "message_part"),
    [
        (of_json_schema({"type": "objekt"}), "objekt"),
        (of_json_schema({"type": "object", "if": {}, "then": {}}), '"if", "then"'),
        (of_json_schema({"type": "string", "pattern": "(?=x)a"}), "look-around"),
        (of_json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}, strict=True), "oneOf"),
        (of_json_schema({"$ref": "#/$defs/x"}), "defs/x"),
        (of_regex("(a"), "unclosed group"),
        (of_lark("start: @nowhere"), "nowhere"),
        (of_lark("start: " + "x" * MAX_CHARACTERS), f"at most {MAX_CHARACTERS}"),
    ],
)
def test_the_error_has_llguidances_message_when_it_refuses_a_grammar(
    grammars: GrammarChecker, grammar: Grammar, message_part: str
) -> None:
    with pytest.raises(GrammarError, match=message_part):
        grammars.check(grammar)


def test_a_checked_grammar_has_its_cost(grammars: GrammarChecker) -> None:
    checked = grammars.check(of_regex("[0-9]{2,6}"))
    assert checked.num_bytes > 0
    assert checked.text == of_regex("[0-9]{2,6}").text


def test_verdicts_are_cached_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def prove(self: Prover, text: str) -> Proof:
        requested.append(text)
        return Proof()

    monkeypatch.setattr(Prover, "prove", prove)
    monkeypatch.setattr(checker, "MAX_VERDICTS", 2)
    one, two, three = (of_choice([text]) for text in "abc")
    checks = GrammarChecker(lambda: "")
    for grammar in (one, two, one, three, one, two):
        checks.check(grammar)
    assert requested == [one.text, two.text, three.text, two.text]
