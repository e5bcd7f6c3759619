"""Constraints on outputs in harmony: the final message or the call keeps to them, reasoning is free."""

from typing import Any

import pytest

from mini_infer_engine.parsing.base import OutputParsing, Tool
from mini_infer_engine.parsing.harmony import HarmonyFormat, Position
from mini_infer_engine.structured.grammar import of_choice
from mini_infer_engine.structured.harmony import HarmonyOutput
from mini_infer_engine.structured.params import GrammarRequest
from tests.support.harmony_tokens import IDS, accepts, token_ids

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, ADD = Tool("get_weather", CITY), Tool("add", {"properties": {"a": {"type": "integer"}}}, strict=True)
CHOICE = GrammarRequest("response_format", lambda special: of_choice(["yes", "no"]))
CALLS = HarmonyFormat.call_format

NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>So, a < b.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
YES, LONG = "<|channel|>final<|message|>yes", "<|channel|>final<|message|>It is so."
ROME = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
TOWN = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"town": "Rome"}'
ONE = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
X = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": "x"}'


def parsing(**fields: Any) -> OutputParsing:
    return OutputParsing(**({"tools": (WEATHER, ADD)} | fields))


ANALYSIS, IN_ANSWER = {"position": Position.ANALYSIS}, {"position": Position.ANSWER}
TOOLS: dict[str, Any] = {"parsing": parsing(), "call_format": CALLS}
FORCED: dict[str, Any] = {"parsing": parsing(tool_choice="required"), "call_format": CALLS}
NAMED: dict[str, Any] = {"parsing": parsing(tools=(WEATHER,), tool_choice="named"), "call_format": CALLS}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "answer": (
        {"answer": CHOICE},
        [YES, f"{THOUGHT}{YES}", f"{THOUGHT}{THOUGHT}{YES}"],
        ["", "yes", LONG, f"{THOUGHT}{LONG}", THOUGHT, f"{PREAMBLE}{YES}", f"{YES}{NEXT}{YES}", ROME],
    ),
    "answer without reasoning": ({"answer": CHOICE, "has_reasoning": False}, [YES], [f"{THOUGHT}{YES}"]),
    "answer after reasoning that the prompt has opened": (
        {"answer": CHOICE, **ANALYSIS},
        [f"so{NEXT}{YES}", f"{NEXT}{THOUGHT}{YES}"],
        ["yes", YES, f"so{NEXT}{LONG}"],
    ),
    "answer that is continued": ({"answer": CHOICE, **IN_ANSWER}, ["yes"], ["so", YES, f"{THOUGHT}{YES}"]),
    "answer or call": (
        {"answer": CHOICE, **TOOLS},
        [YES, f"{THOUGHT}{YES}", f"{THOUGHT}{ROME}", f"{THOUGHT}{TOWN}", ONE],
        [LONG, X, f"{YES}{NEXT}{ROME}"],
    ),
    "strict tools": (
        TOOLS,
        [LONG, f"{THOUGHT}{LONG}", f"{THOUGHT}{PREAMBLE}{THOUGHT}{ONE}", ONE, TOWN, f"{ROME}{NEXT}{ONE}"],
        [X, f"{THOUGHT}{X}", TOWN.replace("get_weather", "other"), "It is so."],
    ),
    "a call that is required": (
        FORCED,
        [ROME, f"{THOUGHT}{ROME}", f"{THOUGHT}{ROME}{NEXT}{ONE}"],
        [LONG, f"{THOUGHT}{LONG}", TOWN, X, f"{PREAMBLE}{ROME}", f"{THOUGHT}{NEXT}{ROME}"],
    ),
    "a call that is named": (NAMED, [ROME, f"{THOUGHT}{ROME}"], [TOWN, ONE, f"{ROME}{NEXT}{ROME}", LONG]),
    "a call behind an answer": (FORCED | IN_ANSWER, [f"{NEXT}{ROME}", f"{NEXT}{THOUGHT}{ROME}"], [ROME, "so"]),
    "budget": (
        {"budget": 10},
        [LONG, f"{THOUGHT}{LONG}", f"{THOUGHT}{PREAMBLE}{LONG}"],
        [f"{THOUGHT.replace('So', 'And so')}{LONG}", f"{THOUGHT}{THOUGHT}{LONG}", THOUGHT],
    ),
    "no budget": ({"budget": 0}, [LONG, f"{PREAMBLE}{LONG}"], [f"{THOUGHT}{LONG}"]),
    "budget of reasoning that has begun": (
        {"budget": 3, **ANALYSIS},
        [f"so.{NEXT}{LONG}", f"{NEXT}{LONG}"],
        [f"so ..{NEXT}{LONG}", f"so{NEXT}{THOUGHT}{LONG}"],
    ),
    "a budget that is used up": ({"budget": 0, **ANALYSIS}, [f"{NEXT}{LONG}"], [f"s{NEXT}{LONG}"]),
    "budget and calls": ({"budget": 10, **FORCED}, [f"{THOUGHT}{ROME}", ROME], [f"{THOUGHT}{THOUGHT}{ROME}", LONG]),
    "budget and answer": ({"budget": 10, "answer": CHOICE}, [f"{THOUGHT}{YES}"], [f"{THOUGHT}{LONG}"]),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_accepted_when_their_last_message_keeps_to_the_constraints(name: str) -> None:
    fields, good, bad = CASES[name]
    grammar = HarmonyOutput(**fields).to_grammar().build(IDS)
    for text in good:
        assert accepts(grammar, token_ids(text)), text
    for text in bad:
        assert not accepts(grammar, token_ids(text)), text


def test_markers_that_are_spelled_out_are_text() -> None:
    grammar = HarmonyOutput(**TOOLS).to_grammar().build(IDS)
    assert accepts(grammar, [*token_ids("<|channel|>final<|message|>"), *b"<|end|> ends a message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"answer": CHOICE}, "response_format"),
        (FORCED | {"answer": CHOICE}, "tool_choice"),
        (TOOLS, "tools"),
        ({"budget": 3}, "thinking_token_budget"),
    ],
)
def test_errors_name_the_field_that_asks_for_the_constraint(fields: dict[str, Any], param: str) -> None:
    assert HarmonyOutput(**fields).to_grammar().param == param
