"""Harmony, gpt-oss's format: outputs of several messages, in every way to cut them into pieces."""

import json
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.parsing.base import OutputParsing, Reasoning
from mini_infer_engine.parsing.harmony import Position, position_after
from mini_infer_engine.parsing.parser import FormatParser
from mini_infer_engine.parsing.registry import OutputFormats
from tests.engine.parsing.support import TOOLS, Read, cuts, read_pieces

BOTH = OutputFormats(tool_call_parser="openai", reasoning_parser="openai_gptoss")
ROME = ("get_weather", '{"city": "Rome"}')
THOUGHT = '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic.<|end|>'
NEXT = "<|start|>assistant"
FINAL = f"{NEXT}<|channel|>final<|message|>"
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME[1]}<|call|>"
REASONING = 'User asks: "What is 2 + 2?" Simple arithmetic.'

CASES: dict[str, tuple[str, Read]] = {
    "reasoning and answer": (f"{THOUGHT}{FINAL}2 + 2 = 4.<|return|>", Read("2 + 2 = 4.", (), REASONING)),
    "without the stop token": (f"{THOUGHT}{FINAL}2 + 2 = 4.", Read("2 + 2 = 4.", (), REASONING)),
    "answer alone": ("<|channel|>final<|message|>Four.<|return|>", Read("Four.")),
    "white space is text": ("<|channel|>final<|message|>\n  Four. \n<|return|>", Read("\n  Four. \n")),
    "call": (f"{THOUGHT}{NEXT}{CALL}", Read("", (ROME,), REASONING)),
    "call without the stop token": (CALL.removesuffix("<|call|>"), Read("", (ROME,))),
    "recipient behind the role": (
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{ROME[1]}<|call|>",
        Read("", (ROME,)),
    ),
    "recipient behind the role of a later message": (
        f"{THOUGHT}{NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{ROME[1]}<|call|>",
        Read("", (ROME,), REASONING),
    ),
    "content type without a space": (
        f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{ROME[1]}<|call|>",
        Read("", (ROME,)),
    ),
    "content type without a marker": (
        f"<|channel|>commentary to=functions.get_weather code<|message|>{ROME[1]}<|call|>",
        Read("", (ROME,)),
    ),
    "no content type": (
        f"<|channel|>commentary to=functions.get_weather<|message|>{ROME[1]}<|call|>",
        Read("", (ROME,)),
    ),
    "call in the channel of reasoning": (
        f"<|channel|>analysis to=functions.get_weather <|constrain|>json<|message|>{ROME[1]}<|call|>",
        Read("", (ROME,)),
    ),
    "name without its namespace": (
        f"<|channel|>commentary to=get_weather <|constrain|>json<|message|>{ROME[1]}<|call|>",
        Read("", (ROME,)),
    ),
    "name that no tool has": (
        "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>",
        Read("", (("other", "{}"),)),
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|><|call|>",
        Read("", (("add", "{}"),)),
    ),
    "arguments that are cut": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{" + '"city": "Ro',
        Read("", (("get_weather", '{"city": "Ro'),)),
    ),
    "several calls": (f"{CALL}{NEXT}{CALL}", Read("", (ROME, ROME))),
    "several calls with ends of messages": (
        f"{CALL.replace('<|call|>', '<|end|>')}{NEXT}{CALL}",
        Read("", (ROME, ROME)),
    ),
    "preamble": (
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>**Plan**:\n1. Look<|end|>{NEXT}{CALL}",
        Read("**Plan**:\n1. Look", (ROME,), REASONING),
    ),
    "preamble and answer": (
        f"<|channel|>commentary<|message|>I look.<|end|>{FINAL}Sunny.<|return|>",
        Read("I look.\nSunny."),
    ),
    "several thoughts": (
        f"{THOUGHT}{NEXT}<|channel|>analysis<|message|>So 4.<|end|>{FINAL}4<|return|>",
        Read("4", (), f"{REASONING}\nSo 4."),
    ),
    "call of a tool that runs within the reasoning": (
        f"<|channel|>analysis to=python code<|message|>print(2 + 2)<|call|>{NEXT}{THOUGHT}{FINAL}4<|return|>",
        Read("4", (), f"print(2 + 2)\n{REASONING}"),
    ),
    "a result that the model has made up": (
        f"{CALL}<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>Rain<|end|>{FINAL}Rain.",
        Read("Rain.", (ROME,)),
    ),
    "reasoning that is cut": ("<|channel|>analysis<|message|>We need", Read("", (), "We need")),
    "header that is cut": (f"{THOUGHT}{NEXT}<|channel|>fin", Read("", (), REASONING)),
    "role that is cut": (f"{THOUGHT}<|start|>assi", Read("", (), REASONING)),
    "channel for JSON": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', Read('{"a": 1}')),
    "mentioned markers": (
        "<|channel|>final<|message|>A message ends at <|end|>, a call at <|call|>. <|message|> <|channel|><|return|>",
        Read("A message ends at <|end|>, a call at <|call|>. <|message|> <|channel|>"),
    ),
    "no channel": ("<|message|>Four.<|return|>", Read("Four.")),
    "unknown channel": ("<|channel|>summary<|message|>Four.<|return|>", Read("Four.")),
    "no header": (" Four, to=x.", Read(" Four, to=x.")),
    "no header, but its beginning": ("to=whom it may concern", Read("to=whom it may concern")),
    "no header, but a marker": (f"<|channel|>{'so ' * 100}", Read(f"<|channel|>{'so ' * 100}")),
    "no header and a next message": (f"Let me see.<|end|>{FINAL}Four.", Read("Let me see.\nFour.")),
    "nothing": ("", Read()),
}


@pytest.mark.parametrize("name", CASES)
def test_messages_are_parsed_alike_for_any_pieces(name: str) -> None:
    text, expected = CASES[name]
    for pieces in [[text], *(cuts(text, seed=len(text), count=5) if text else [])]:
        assert read_pieces(pieces, BOTH) == expected, pieces


ORACLE: dict[str, list[dict[str, Any]] | None] = json.loads(
    (Path(__file__).parent / "harmony_messages.json").read_text()
)
"""Messages as openai-harmony 0.0.8 parses them (tests/support/harmony_oracle.py); null where it raises an error."""


def read_of(messages: list[dict[str, Any]]) -> Read:
    """Returns the parts of messages by the channels' meaning, each kind with line ends between them."""
    reasoning, content, calls = list[str](), list[str](), list[tuple[str, str]]()
    for message in messages:
        recipient, text = message["recipient"] or "", message["text"]
        name = recipient.removeprefix("functions.")
        if message["role"] != "assistant":
            continue
        if name != recipient or name in [tool.name for tool in TOOLS]:
            calls.append((name, text or "{}"))
        elif text:
            (reasoning if message["channel"] == "analysis" else content).append(text)
    return Read("\n".join(content), tuple(calls), "\n".join(reasoning))


@pytest.mark.parametrize("name", [name for name, messages in ORACLE.items() if messages is not None])
def test_messages_equal_those_of_openai_harmony(name: str) -> None:
    messages = ORACLE[name]
    assert messages is not None
    assert read_pieces([CASES[name][0]], BOTH) == read_of(messages)


def test_calls_are_the_answer_when_a_request_has_no_tools() -> None:
    assert read_pieces([f"{THOUGHT}{NEXT}{CALL}"], BOTH, tools=()) == Read(ROME[1], (), REASONING)
    without = OutputFormats(reasoning_parser="openai_gptoss")
    assert read_pieces([f"{THOUGHT}{NEXT}{CALL}"], without) == Read(ROME[1], (), REASONING)


def test_analysis_is_the_answer_when_no_reasoning_parser_is_chosen() -> None:
    formats = OutputFormats(tool_call_parser="openai")
    text = f"{THOUGHT}{FINAL}4<|return|>"
    for tools in (TOOLS, ()):
        assert read_pieces([text], formats, tools) == Read(f"{REASONING}\n4")
    assert read_pieces([f"{THOUGHT}{NEXT}{CALL}"], formats) == Read(REASONING, (ROME,))


@pytest.mark.parametrize("tool_choice", ["required", "named"])
def test_preambles_are_left_out_when_a_call_is_forced(tool_choice: str) -> None:
    parser = FormatParser(BOTH, OutputParsing(tools=TOOLS, tool_choice=tool_choice))  # type: ignore[arg-type]
    parts = parser.push(f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}") + parser.finish()
    assert [type(part).__name__ for part in parts] == ["ToolCallBegin", "ToolCallArguments"]


@pytest.mark.parametrize(
    ("prompt_end", "position"),
    [
        ("", Position.HEADER),
        ("What is 2 + 2?<|end|><|start|>assistant", Position.HEADER),
        ("<|end|><|start|>assistant\n", Position.HEADER),
        ("<|start|>assistant<|channel|>analysis<|message|>", Position.ANALYSIS),
        ("<|start|>assistant<|channel|>analysis<|message|>We need", Position.ANALYSIS),
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>", Position.ANSWER),
        ("<|start|>assistant<|channel|>final<|message|>The answer", Position.ANSWER),
        ("words of a long answer that is to be continued", Position.ANSWER),
    ],
)
def test_the_position_is_found_by_the_end_of_the_prompt(prompt_end: str, position: Position) -> None:
    assert position_after(prompt_end) is position


def test_an_output_goes_on_within_the_message_that_the_prompt_has_opened() -> None:
    thinking = "<|start|>assistant<|channel|>analysis<|message|>"
    text = f" and so<|end|>{FINAL}4"
    for pieces in cuts(text, seed=1):
        assert read_pieces(pieces, BOTH, prompt_end=thinking) == Read("4", (), " and so")
        assert read_pieces([" is 4", "<|return|>"], BOTH, prompt_end=f"{FINAL}The answer") == Read(" is 4")


def test_a_text_ends_within_reasoning_until_its_message_ends() -> None:
    parser = FormatParser(BOTH, OutputParsing())
    assert not parser.is_reasoning
    assert parser.push("<|channel|>analysis<|message|>We") == [Reasoning("We")]
    assert parser.is_reasoning
    parser.push(f"<|end|>{NEXT}")
    assert not parser.is_reasoning
