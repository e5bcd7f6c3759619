import pytest

from mini_infer_engine.dry.vocabulary import TURN_START_ID
from mini_infer_engine.structured.grammar import of_choice
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.thinking import within_budget
from tests.support.grammars import accepts, matcher_of

BEGIN, END = ord("<"), ord(">")
"""Any token may be a marker; here tokens are bytes."""
ANSWER = GrammarRequest("response_format", lambda special: of_choice(["yes", "no"]))


@pytest.mark.parametrize("budget", [0, 5, 30_000])
def test_thinking_ends_within_its_budget_and_the_answer_is_free(budget: int) -> None:
    grammar = within_budget(budget, END, None, None).build({})
    few, many = "x" * min(budget, 4), "x" * budget
    for text in (f"{few}>", f"{many}>", f"{few}>so it is > \n"):
        assert accepts(grammar, text), text
    assert not accepts(grammar, few)
    matcher = matcher_of(grammar)
    assert matcher.try_consume_tokens(list(many.encode())) == budget
    assert matcher.try_consume_tokens([ord("x")]) == 0, "the end is all that may follow"
    assert matcher.try_consume_tokens([END, TURN_START_ID]) == 2, "special tokens too may follow"


def test_an_output_is_free_when_it_does_not_begin_with_thinking() -> None:
    grammar = within_budget(3, END, BEGIN, None).build({})
    for text in ("", "a long answer", "<abc>then", "<>", "so < that it is more"):
        assert accepts(grammar, text), text
    assert not accepts(grammar, "<abcd>then")


def test_no_tool_call_begins_within_thinking() -> None:
    """A parser would take it for the end of the thinking, and what it is held to would be left out."""
    for answer in (None, ANSWER):
        grammar = within_budget(3, END, None, answer, call_id=ord("c")).build({})
        assert accepts(grammar, "ab>yes")
        assert not accepts(grammar, "ac>yes")
    assert accepts(within_budget(3, END, None, None, call_id=ord("c")).build({}), "ab>c")


def test_a_structured_answer_follows_thinking() -> None:
    inside, may_think = (within_budget(3, END, begin, ANSWER) for begin in (None, BEGIN))
    assert inside.param == "response_format"
    for text in ("abc>yes", ">\n\nno"):
        assert accepts(inside.build({}), text), text
    for text in ("yes", "<abc>yes"):
        assert accepts(may_think.build({}), text), text
    for grammar in (inside, may_think):
        assert not accepts(grammar.build({}), "<abcd>yes")
        assert not accepts(grammar.build({}), "<ab>maybe")


def test_special_tokens_can_mark_thinking() -> None:
    grammar = within_budget(2, TURN_START_ID, BEGIN, None).build({})
    assert accepts(grammar, [BEGIN, *b"ab", TURN_START_ID, *b"cd"])
    assert not accepts(grammar, [BEGIN, *b"abc", TURN_START_ID])
