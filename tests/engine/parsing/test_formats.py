"""Every format but Hermes', which has a file of its own: calls, what stands around them, and what breaks off."""

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_engine.parsing.base import OutputParsing, Tool, ToolCallBegin
from mini_infer_engine.parsing.parser import FormatParser
from mini_infer_engine.parsing.registry import TOOL_FORMATS, OutputFormats
from tests.engine.parsing.support import Read, cuts, read_pieces

_PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "where": {"type": "object"},
    "rain": {"type": ["boolean", "null"]},
    "level": {"enum": [1, 2]},
    "side": {"const": "5"},
}
TOOLS = (Tool("get_weather", {"type": "object", "properties": _PROPERTIES}), Tool("add"))
ROME = ("get_weather", '{"city": "Rome"}')
ADD = ("add", '{"a": 1, "b": [2, {"c": "]}"}]}')
LLAMA_ROME = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
LLAMA_ADD = '{"name": "add", "parameters": ' + ADD[1] + "}"
DEEPSEEK_ROME = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>'
)
DEEPSEEK_ADD = f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD[1]}<｜tool▁call▁end｜>"
CODER_ROME = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
GLM_ROME = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
GLM_VALUES = {
    "city": '\nNew\n"York"\n',
    "days": "3",
    "units": "null",
    "where": '{"a": [1, null]}',
    "rain": "true",
    "level": "2",
    "side": "5",
}
GLM_READ = (
    "get_weather",
    '{"city": "\\nNew\\n\\"York\\"\\n", "days": 3, "units": null, "where": {"a": [1, null]}, "rain": true, "level": 2, '
    '"side": "5"}',
)


def glm(line_end: str) -> str:
    arguments = (
        f"<arg_key>{key}</arg_key>{line_end}<arg_value>{value}</arg_value>{line_end}"
        for key, value in GLM_VALUES.items()
    )
    return f"<tool_call>get_weather{line_end}{''.join(arguments)}</tool_call>"


KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_ROME = '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>'
KIMI_ADD = f"<|tool_call_begin|>functions.add:12 <|tool_call_argument_begin|> {ADD[1]} <|tool_call_end|>"
INVOKE_ROME = '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
INVOKE_ADD = '<invoke name="add">\n</invoke>\n'
INVOKE_VALUES = (
    '<invoke name="get_weather">\n'
    + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in GLM_VALUES.items())
    + "</invoke>\n"
)
SEED_ROME = "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>"


def minimax(*invokes: str) -> str:
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


GEMMA_ROME = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
GEMMA_ADD = '<|tool_call>call:add{a:1,b:[2,{c:<|"|>]}<|"|>}]}<tool_call|>'
XLAM_ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
XLAM_ADD = '{"name": "add", "arguments": ' + ADD[1] + "}"

CASES: list[tuple[str, str, Read]] = [
    ("llama3_json", LLAMA_ROME, Read("", (ROME,))),
    ("llama3_json", f"<|python_tag|>{LLAMA_ROME}", Read("", (ROME,))),
    ("llama3_json", f"{LLAMA_ROME}; {LLAMA_ADD} ;{LLAMA_ROME}", Read("", (ROME, ADD, ROME))),
    ("llama3_json", f"Let me look: {LLAMA_ROME} Done.", Read("Let me look: Done.", (ROME,))),
    ("llama3_json", f'{{"type": "function", {LLAMA_ROME[1:]}', Read("", (ROME,))),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', Read('{"name": "Bob", "parameters": {}}')),
    ("llama3_json", '{"city": {"name": "add"}}', Read('{"city": {"name": "add"}}')),
    ("llama3_json", '{"name": "add"}; ok', Read('{"name": "add"}; ok')),
    ("llama3_json", "<|python_tag|>search.call(x)", Read("<|python_tag|>search.call(x)")),
    ("llama3_json", "if (x) { y = {}; }", Read("if (x) { y = {}; }")),
    ("llama3_json", LLAMA_ROME[:-5], Read("", (("get_weather", '{"city": "Ro'),))),
    ("llama3_json", f"[{LLAMA_ROME}]", Read("", (ROME,))),
    ("llama3_json", f"[ {LLAMA_ROME} , {LLAMA_ADD}\n]\nDone.", Read("Done.", (ROME, ADD))),
    ("llama3_json", f"<|python_tag|>[{LLAMA_ROME}]", Read("", (ROME,))),
    ("llama3_json", f"[{LLAMA_ROME[:-5]}", Read("", (("get_weather", '{"city": "Ro'),))),
    ("llama3_json", '[{"city": 1}] and [1]', Read('[{"city": 1}] and [1]')),
    ("llama3_json", f'{{"type": "function", "function": {LLAMA_ROME}}}', Read("", (ROME,))),
    ("llama3_json", f'[{{"function": {LLAMA_ROME}}}]', Read("", (ROME,))),
    ("llama3_json", '{"function": {"city": 1}}', Read('{"function": {"city": 1}}')),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]', Read("", (ROME,))),
    (
        "mistral",
        f'Hello[TOOL_CALLS][{{"arguments": {ADD[1]}, "name": "add"}}, '
        f'{{"name": "get_weather", "arguments": {ROME[1]}}}]\n',
        Read("Hello", (ADD, ROME)),
    ),
    ("mistral", f"Hello[TOOL_CALLS]get_weather{ROME[1]}", Read("Hello", (ROME,))),
    ("mistral", f"[TOOL_CALLS]add{ADD[1]}[TOOL_CALLS]get_weather{ROME[1]}", Read("", (ADD, ROME))),
    (
        "mistral",
        f"[TOOL_CALLS]add[ARGS]{ADD[1]}[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{ROME[1]}",
        Read("", (ADD, ROME)),
    ),
    ("mistral", "[TOOL_CALLS] no call at all", Read("[TOOL_CALLS] no call at all")),
    ("mistral", "[TOOL_CALLS] [1, 2]", Read("[TOOL_CALLS] [1, 2]")),
    ("mistral", "an [array] and [TOOL_", Read("an [array] and [TOOL_")),
    ("mistral", '[TOOL_CALLS]add{"a": "{', Read("", (("add", '{"a": "{'),))),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{DEEPSEEK_ROME}<｜tool▁calls▁end｜>", Read("", (ROME,))),
    (
        "deepseek_v3",
        f"I look.\n<｜tool▁calls▁begin｜>{DEEPSEEK_ROME}\n{DEEPSEEK_ROME}<｜tool▁calls▁end｜> Done",
        Read("I look.\nDone", (ROME, ROME)),
    ),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{DEEPSEEK_ROME[22:]}", Read("", (ROME,))),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{DEEPSEEK_ROME[:-8]}", Read("", (ROME,))),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing", Read("<｜tool▁calls▁begin｜>nothing")),
    ("deepseek_v3", "a <｜tool▁cal", Read("a <｜tool▁cal")),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜>{DEEPSEEK_ADD}{DEEPSEEK_ADD}<｜tool▁calls▁end｜>", Read("", (ADD, ADD))),
    ("granite", f'<|tool_call|>[{{"name": "add", "arguments": {ADD[1]}}}]', Read("", (ADD,))),
    ("granite", f'I look.\n<tool_call> [{{"arguments": {ADD[1]}, "name": "add"}}, 5', Read("I look.\n, 5", (ADD,))),
    ("granite", "<|tool_call|> is a marker", Read("<|tool_call|> is a marker")),
    ("phi4_mini_json", f'functools[{{"name": "add", "arguments": {ADD[1]}}}] ', Read("", (ADD,))),
    ("phi4_mini_json", "import functools\n\nfunctools.cache", Read("import functools\n\nfunctools.cache")),
    ("qwen3_coder", CODER_ROME, Read("", (ROME,))),
    ("qwen3_coder", f"I look.\n\n{CODER_ROME}\n{CODER_ROME}\nDone.", Read("I look.\n\nDone.", (ROME, ROME))),
    ("qwen3_coder", CODER_ROME[12:], Read("", (ROME,))),
    ("qwen3_coder", CODER_ROME[:-4], Read("", (ROME,))),
    ("qwen3_coder", CODER_ROME[: CODER_ROME.index("Ro") + 2], Read("", (("get_weather", '{"city": "Ro'),))),
    (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n"York"\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n"
        "<parameter=units>null</parameter><parameter=where>{'a': [1, None]}</parameter>"
        "<parameter=rain>\nTrue\n</parameter>"
        "<parameter=other>5</parameter></function></tool_call>",
        Read(
            "",
            (
                (
                    "get_weather",
                    '{"city": "New\\n\\"York\\"\\n", "days": 3, "units": null, "where": {"a": [1, null]}, '
                    '"rain": true, "other": "5"}',
                ),
            ),
        ),
    ),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=level>\n2\n</parameter><parameter=side>\n5\n</parameter></function>",
        Read("", (("get_weather", '{"level": 2, "side": "5"}'),)),
    ),
    ("qwen3_coder", "<tool_call>\n<function=add>\n</function>\n</tool_call>", Read("", (("add", "{}"),))),
    ("qwen3_coder", "see <function=f> and <tool_call> </x>", Read("see <function=f> and <tool_call> </x>")),
    ("glm45", GLM_ROME, Read("", (ROME,))),
    ("glm47", GLM_ROME.replace("\n", ""), Read("", (ROME,))),
    ("glm45", f"I look.\n{GLM_ROME}\n{GLM_ROME}\nDone.", Read("I look.\nDone.", (ROME, ROME))),
    ("glm45", glm(""), Read("", (GLM_READ,))),
    ("glm47", glm("\n"), Read("", (GLM_READ,))),
    ("glm47", "<tool_call>add</tool_call><tool_call>add\n</tool_call>", Read("", (("add", "{}"), ("add", "{}")))),
    ("glm45", GLM_ROME[: GLM_ROME.index("me<")], Read("", (("get_weather", '{"city": "Ro'),))),
    ("glm45", GLM_ROME[:-4], Read("", (("get_weather", '{"city": "Rome"'),))),
    ("glm45", "<tool_call> is a tag, <tool_call>add is none", Read("<tool_call> is a tag, <tool_call>add is none")),
    ("kimi_k2", f"{KIMI_BEGIN}{KIMI_ROME}{KIMI_END}", Read("", (ROME,))),
    ("kimi_k2", f"I look. {KIMI_BEGIN}\n{KIMI_ROME}\n{KIMI_ADD}\n{KIMI_END} Done.", Read("I look. Done.", (ROME, ADD))),
    ("kimi_k2", KIMI_ROME, Read("", (ROME,))),
    ("kimi_k2", KIMI_BEGIN + KIMI_ROME.replace("functions.get_weather:0", "get_weather "), Read("", (ROME,))),
    ("kimi_k2", KIMI_BEGIN + KIMI_ROME[:-19], Read("", (("get_weather", '{"city": "Rome'),))),
    ("kimi_k2", f"{KIMI_BEGIN} or <|tool_call_begin|>f", Read(f"{KIMI_BEGIN} or <|tool_call_begin|>f")),
    ("minimax_m2", minimax(INVOKE_ROME), Read("", (ROME,))),
    ("minimax_m2", f"I look. {minimax(INVOKE_ROME, INVOKE_ADD)} Done.", Read("I look. Done.", (ROME, ("add", "{}")))),
    ("minimax_m2", minimax(INVOKE_ROME).replace("\n", ""), Read("", (ROME,))),
    ("minimax_m2", minimax(INVOKE_VALUES), Read("", (GLM_READ,))),
    ("minimax_m2", INVOKE_ROME, Read("", (ROME,))),
    ("minimax_m2", minimax(INVOKE_ROME, INVOKE_ADD.replace("add", "unknown")), Read("", (ROME, ("unknown", "{}")))),
    ("minimax_m2", minimax(INVOKE_ROME)[:-4], Read("", (ROME,))),
    ("minimax_m2", minimax(INVOKE_ROME).partition("me<")[0], Read("", (("get_weather", '{"city": "Ro'),))),
    ("minimax_m2", 'a <minimax:tool_call> or <invoke name="x">', Read('a <minimax:tool_call> or <invoke name="x">')),
    ("seed_oss", SEED_ROME, Read("", (ROME,))),
    ("seed_oss", f"I look. {SEED_ROME}\n{SEED_ROME} Done.", Read("I look. Done.", (ROME, ROME))),
    ("gemma4", GEMMA_ROME, Read("", (ROME,))),
    ("gemma4", f"I look. {GEMMA_ROME}{GEMMA_ADD} Done.", Read("I look. Done.", (ROME, ADD))),
    ("gemma4", "<|tool_call>call:add{}<tool_call|>", Read("", (("add", "{}"),))),
    (
        "gemma4",
        '<|tool_call>call:add{ s : <|"|>a "b",}\n<|"|>, <|"|>k:<|"|>:{x:[],y:{}},n:-1.5e3,t:true,z:null,w:two words,}'
        "<tool_call|>",
        Read(
            "",
            (
                (
                    "add",
                    '{"s": "a \\"b\\",}\\n", "k:": {"x": [], "y": {}}, "n": -1.5e3, "t": true, "z": null, '
                    '"w": "two words"}',
                ),
            ),
        ),
    ),
    ("gemma4", GEMMA_ROME[: GEMMA_ROME.index("me<")], Read("", (("get_weather", '{"city": "Ro'),))),
    ("gemma4", GEMMA_ROME[:-4], Read("", (ROME,))),
    ("gemma4", "a <|tool_call> b <|tool_call>call: c", Read("a <|tool_call> b <|tool_call>call: c")),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>",
        Read("", (ROME,)),
    ),
    ("xlam", f"[{XLAM_ROME}]", Read("", (ROME,))),
    ("xlam", f"I look. [{XLAM_ROME}, {XLAM_ADD}] Done.", Read("I look. Done.", (ROME, ADD))),
    ("xlam", f"Well.</think>[{XLAM_ROME}]", Read("Well.</think>", (ROME,))),
    ("xlam", f"So:\n```json\n[{XLAM_ROME}]\n```\nDone.", Read("So:\nDone.", (ROME,))),
    ("xlam", f"```\n{XLAM_ROME}\n```", Read("", (ROME,))),
    ("xlam", f"[TOOL_CALLS] [{XLAM_ROME}]", Read("", (ROME,))),
    ("xlam", f"[{XLAM_ROME[:-4]}", Read("", (("get_weather", '{"city": "Rom'),))),
    (
        "xlam",
        '```json\n[{"city": 1}]\n``` [1] {} [TOOL_CALLS]',
        Read('```json\n[{"city": 1}]\n``` [1] {} [TOOL_CALLS]'),
    ),
    ("xlam", '[{"name": "Bob", "arguments": {}}]', Read('[{"name": "Bob", "arguments": {}}]')),
    ("pythonic", "[get_weather(city='Rome')]", Read("", (ROME,))),
    ("pythonic", '[get_weather(city="Rome"), add(a = 1,b=[2, {"c": "]}"}])]', Read("", (ROME, ADD))),
    ("pythonic", "I look: [get_weather(city='Rome')]\nDone.", Read("I look: Done.", (ROME,))),
    ("pythonic", "[add()]", Read("", (("add", "{}"),))),
    (
        "pythonic",
        "[add(a='it\\'s', b=-1.5, c=True, d=None, e=false, f={'x': (1, 2)}, g=lambda)]",
        Read(
            "",
            (
                (
                    "add",
                    '{"a": "it\'s", "b": -1.5, "c": true, "d": null, "e": false, "f": {"x": [1, 2]}, "g": "lambda"}',
                ),
            ),
        ),
    ),
    ("pythonic", "[1, 2] and [unknown(a=1)] and [add", Read("[1, 2] and [unknown(a=1)] and [add")),
    ("pythonic", "[get_weather(city='Rome', days=", Read("", (("get_weather", '{"city": "Rome"'),))),
    ("llama4_pythonic", "<|python_start|>[get_weather(city='Rome')]<|python_end|>", Read("", (ROME,))),
    ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>", Read("<|python_start|>print(1)<|python_end|>")),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_tool_calls_are_parsed_alike_for_any_pieces(name: str, text: str, expected: Read) -> None:
    formats = OutputFormats(tool_call_parser=name)
    for pieces in [[text], *cuts(text, seed=len(text), count=5)]:
        assert read_pieces(pieces, formats, TOOLS) == expected, pieces


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.call_format.arguments == "json"])
def test_a_call_that_the_grammar_allows_is_parsed(name: str) -> None:
    form = TOOL_FORMATS[name].call_format
    calls = [
        f"{form.before_name}{name}{':0' if form.has_number else ''}{form.after_name}{arguments}{form.after_arguments}"
        for name, arguments in (ROME, ADD)
    ]
    text = form.calls_begin + form.separator.join(calls) + form.calls_end
    assert text.startswith(form.trigger)
    assert read_pieces([text], OutputFormats(tool_call_parser=name), TOOLS) == Read("", (ROME, ADD))


MARKS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.markers})
FRAGMENTS = [
    *MARKS,
    "<function=",
    "<invoke name=",
    ">",
    "<parameter=",
    "</parameter>",
    "</function>",
    "```json",
    "add",
    "city",
    "x",
    "Rome",
]
FRAGMENTS += ['{"name": "add"', ', "arguments": ', '"parameters"', "{", "}", "[", "]", "(", ")", "=", ":", ",", ";"]
FRAGMENTS += ["```", "get_weather", "Rome</arg_value>", "days"]
FRAGMENTS += ['"', "'", "\\", "\\u00e9", "1", "null", "<", ">", " ", "\n", "<think>", "</think>"]


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=25), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_parsing_is_independent_of_where_text_is_cut(name: str, fragments: list[str], seed: int) -> None:
    formats = OutputFormats(tool_call_parser=name, reasoning_parser="qwen3")
    text = "".join(fragments)
    whole = read_pieces([text], formats, TOOLS)
    chosen = random.Random(seed)
    places = sorted(chosen.sample(range(len(text) + 1), chosen.randint(0, len(text))))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert read_pieces(pieces, formats, TOOLS) == whole
    assert read_pieces(list(text), formats, TOOLS) == whole


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_text_is_lost_when_nothing_is_a_call(name: str) -> None:
    """Pieces of every format's markers, in an order that means nothing."""
    text = "".join(f"{mark} x{index}" for index, mark in enumerate(MARKS)) + ' ! {"a": [1}, [b(, <function=c>'
    read = read_pieces([text], OutputFormats(tool_call_parser=name), TOOLS)
    assert (read.content, read.calls) == (text, ())


@pytest.mark.parametrize(("name", "form"), [("hermes", r"call_[a-zA-Z0-9]{24}"), ("mistral", r"[a-zA-Z0-9]{9}")])
def test_tool_call_ids_are_unique_and_valid_for_templates(name: str, form: str) -> None:
    style = TOOL_FORMATS[name].call_format
    call = f"{style.before_name}add{style.after_name}{{}}{style.after_arguments}"
    text = style.calls_begin + style.separator.join([call] * 3) + style.calls_end
    parser = FormatParser(OutputFormats(tool_call_parser=name), OutputParsing(tools=TOOLS))
    ids = [part.id for part in parser.push(text) + parser.finish() if isinstance(part, ToolCallBegin)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(form, one) for one in ids)


def test_kimi_calls_have_the_ids_that_the_model_wrote_when_they_differ() -> None:
    parser = FormatParser(OutputFormats(tool_call_parser="kimi_k2"), OutputParsing(tools=TOOLS))
    text = f"{KIMI_BEGIN}{KIMI_ROME}{KIMI_ADD}{KIMI_ROME}{KIMI_END}"
    ids = [part.id for part in parser.push(text) + parser.finish() if isinstance(part, ToolCallBegin)]
    assert ids[:2] == ["functions.get_weather:0", "functions.add:12"]
    assert re.fullmatch(r"call_[a-zA-Z0-9]{24}", ids[2])


def test_gemma_arguments_are_parsed_when_they_nest_deeply() -> None:
    read = read_pieces(["<|tool_call>call:add{a:" + "[" * 5000], OutputFormats(tool_call_parser="gemma4"), TOOLS)
    assert read.calls == (("add", '{"a": ' + "[" * 5000),)
