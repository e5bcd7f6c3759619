import msgspec
import pytest

from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.parsing.parser import FormatParser
from mini_infer_engine.parsing.registry import OutputFormats
from tests.engine.parsing.support import TOOLS, Read, cuts, read_pieces

FORMATS = OutputFormats(tool_call_parser="hermes", reasoning_parser="qwen3")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("get_weather", '{"city": "Rome"}')

CASES = {
    "plain": ("Hello.\n", Read("Hello.\n")),
    "only a call": (CALL, Read("", (ROME,))),
    "text before": (f"Let me look.\n{CALL}", Read("Let me look.", (ROME,))),
    "text around": (f"Let me look.\n{CALL}\nDone.", Read("Let me look.\nDone.", (ROME,))),
    "two calls": (f"{CALL}\n{CALL}\n", Read("", (ROME, ROME))),
    "no white space": (CALL.replace("\n", "") * 2, Read("", (ROME, ROME))),
    "thinking first": (f"<think>\nRome?\n</think>\n\n{CALL}", Read("", (ROME,), "Rome?")),
    "arguments first": (
        '<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "add"}</tool_call>',
        Read("", (("add", '{"a": [1, {"b": "}"}]}'),)),
    ),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', Read("", (("add", "{}"),))),
    "null arguments": ('<tool_call>{"name": "add", "arguments": null}</tool_call>', Read("", (("add", "{}"),))),
    "arguments in a string": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud83d\\ude00\\u00e9\\"}"}</tool_call>',
        Read("", (("add", '{"a": "\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}"}'),)),
    ),
    "markers in a string": (
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><tool_call> \\" {"}}</tool_call>ok',
        Read("ok", (("add", '{"a": "</tool_call><tool_call> \\" {"}'),)),
    ),
    "a brace is missing": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>\nok',
        Read("ok", (("add", '{"a": 1}'),)),
    ),
    "the end marker is missing": (f"{CALL[:-13]}\n{CALL}", Read("", (ROME, ROME))),
    "cut in the arguments": (CALL[:61], Read("", (("get_weather", '{"city": "Ro'),))),
    "cut in the name": (CALL[:25], Read(CALL[:25])),
    "cut in the marker": ("So <tool_c", Read("So <tool_c")),
    "two objects in one pair": (
        '<tool_call>\n{"name": "add", "arguments": {}}\n'
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>ok',
        Read("ok", (("add", "{}"), ("get_weather", '{"city": "Rome"}'))),
    ),
    "two objects with a comma": (
        '<tool_call>{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}</tool_call>',
        Read("", (("add", "{}"), ("add", "{}"))),
    ),
    "a list": (
        '<tool_call>[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]</tool_call>ok',
        Read("ok", (("add", "{}"), ("add", "{}"))),
    ),
    "a list of one that is cut": ('<tool_call>[{"name": "add", "arguments": {}}', Read("", (("add", "{}"),))),
    "an object as OpenAI's API has it": (
        '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>',
        Read("", (("add", '{"a": 1}'),)),
    ),
    "a second object that is no call": (
        '<tool_call>{"name": "add", "arguments": {}} {"city": 1}</tool_call>ok',
        Read('{"city": 1}ok', (("add", "{}"),)),
    ),
    "no JSON": ("<tool_call>add(1, 2)</tool_call> ok", Read("<tool_call>add(1, 2)</tool_call> ok")),
    "no name": ('<tool_call>{"city": "Rome"}</tool_call>', Read('<tool_call>{"city": "Rome"}</tool_call>')),
    "an end without a beginning": ("a </tool_call> b", Read("a </tool_call> b")),
    "less-than signs": ("if a < b: <tool> <<", Read("if a < b: <tool> <<")),
}


@pytest.mark.parametrize("name", CASES)
def test_tool_calls_are_parsed_alike_for_any_pieces(name: str) -> None:
    text, expected = CASES[name]
    assert read_pieces([text], FORMATS) == expected
    for pieces in cuts(text, seed=len(name)):
        assert read_pieces(pieces, FORMATS) == expected, pieces


def test_a_partial_call_is_not_content_when_a_call_is_required() -> None:
    for choice in ("required", "named"):
        parser = FormatParser(FORMATS, msgspec.convert({"tools": TOOLS, "tool_choice": choice}, OutputParsing))
        assert parser.push(CALL[:25]) + parser.finish() == []


def test_calls_are_text_when_there_are_no_tools() -> None:
    assert read_pieces([f"a\n{CALL}\n"], FORMATS, tools=()) == Read(f"a\n{CALL}\n")
