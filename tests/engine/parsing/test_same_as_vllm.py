"""Texts of the kinds that vLLM 0.26 tests its parsers with (tests/tool_parsers, tests/reasoning of its source package):
the same calls are found here. Where it throws text away that stands behind or between calls, it is kept here.
"""

import json
from typing import Any

import pytest

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.registry import OutputFormats
from tests.engine.parsing.support import cuts, read_pieces

Calls = list[tuple[str, dict[str, Any]]]

_ALL_TYPES: dict[str, Any] = {
    "text": "hello",
    "whole": 42,
    "part": 3.14,
    "yes": True,
    "nothing": None,
    "list": ["a", "b"],
    "inner": {"deep": {"deeper": {"deepest": {"value": 1}}}},
    "no_list": [],
    "no_inner": {},
}
_ESCAPED: dict[str, Any] = {"said": 'He said "hi {there} [you]"', "path": "C:\\Users\\file", "lines": "1\n2", "é": "🎉"}
_QUESTIONS = {"questions": [{"question": "Why?", "several": True}]}
TOOLS = (
    Tool("find", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("book"),
    Tool("now"),
    Tool("ask", {"type": "object", "properties": {"questions": {"anyOf": [{"type": "array"}, {"type": "null"}]}}}),
)
_FIND: tuple[str, dict[str, Any]] = ("find", {"city": "Tokyo", "days": 3})
_BOOK: tuple[str, dict[str, Any]] = ("book", {"at": "2025-01-15"})
_NOW: tuple[str, dict[str, Any]] = ("now", {})
ANY_CALLS: list[Calls] = [
    [_FIND],
    [_NOW],
    [_FIND, _BOOK],
    [_BOOK, _NOW, _BOOK],
    [("book", _ALL_TYPES)],
    [("book", _ESCAPED)],
    [("ask", _QUESTIONS)],
    [("book", {"name": "John Doe", "arguments": {"name": "x"}})],
]


def _objects(calls: Calls, key: str = "arguments", *, name_first: bool = True, ensure_ascii: bool = True) -> list[str]:
    pairs = [(("name", name), (key, arguments)) for name, arguments in calls]
    return [json.dumps(dict(pair if name_first else pair[::-1]), ensure_ascii=ensure_ascii) for pair in pairs]


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _objects(calls))


def _hermes_tight(calls: Calls) -> str:
    return "".join(f"<tool_call>{call}</tool_call>" for call in _objects(calls, ensure_ascii=False))


def _llama(calls: Calls) -> str:
    return "; ".join(_objects(calls, "parameters"))


def _llama_with_other_key(calls: Calls) -> str:
    return "<|python_tag|>" + " ; ".join(_objects(calls))


def _mistral_list(calls: Calls) -> str:
    return f"[TOOL_CALLS] [{', '.join(_objects(calls))}]"


def _mistral_arguments_first(calls: Calls) -> str:
    return f"[TOOL_CALLS]  [ {' , '.join(_objects(calls, name_first=False))} ]"


def _mistral_names(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}{json.dumps(arguments)}" for name, arguments in calls)


def _mistral_marked_names(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _deepseek_v3(calls: Calls) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def _granite(calls: Calls) -> str:
    return f"<|tool_call|> [\n  {',  '.join(_objects(calls))}\n]"


def _phi4(calls: Calls) -> str:
    return f"functools[{', '.join(_objects(calls))}]"


def _pythonic(calls: Calls) -> str:
    each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    return f"[{', '.join(each)}]"


def _llama4(calls: Calls) -> str:
    return f"<|python_start|>{_pythonic(calls)}<|python_end|>"


WRITERS = {
    _hermes: "hermes",
    _hermes_tight: "hermes",
    _llama: "llama3_json",
    _llama_with_other_key: "llama3_json",
    _mistral_list: "mistral",
    _mistral_arguments_first: "mistral",
    _mistral_names: "mistral_v11",
    _mistral_marked_names: "mistral_v13",
    _deepseek_v3: "deepseek_v3",
    _deepseek_v31: "deepseek_v31",
    _granite: "granite",
    _phi4: "phi4_mini_json",
    _pythonic: "pythonic",
    _llama4: "llama4_pythonic",
}


@pytest.mark.parametrize("calls", ANY_CALLS, ids=lambda calls: "+".join(name for name, _ in calls))
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_calls_are_parsed_as_by_vllm_for_any_pieces(writer: Any, calls: Calls) -> None:
    formats = OutputFormats(tool_call_parser=WRITERS[writer])
    text = writer(calls)
    for pieces in [[text], list(text), *cuts(text, seed=len(text), count=3)[1::7]]:
        read = read_pieces(pieces, formats, TOOLS)
        assert [(name, json.loads(arguments)) for name, arguments in read.calls] == calls, pieces
        assert read.content == ""


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_text_before_calls_is_content(writer: Any) -> None:
    text = "Let me check the weather." + writer([_FIND])
    read = read_pieces([text], OutputFormats(tool_call_parser=WRITERS[writer]), TOOLS)
    assert (read.content, len(read.calls)) == ("Let me check the weather.", 1)


@pytest.mark.parametrize("name", sorted(set(WRITERS.values())))
@pytest.mark.parametrize(
    "text",
    [
        "How can I help you today? I can check the weather.",
        "hello world[A(A=\t)A(A=,\t)A(A=,\t",
        "{hello world[A(A=\t)A(A=,\t",
        '{"parameters": {}}',
        '{"name": "nobody"}',
        "",
    ],
)
def test_text_is_content_when_it_is_no_call(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        read = read_pieces(pieces, OutputFormats(tool_call_parser=name), TOOLS)
        assert (read.content, read.calls) == (text, ())


_CODER_HEAD = "<tool_call>\n<function=find>\n"
CODER: dict[str, tuple[str, Calls]] = {
    "without the outer marker": ("<function=now>\n</function>", [_NOW]),
    "without line ends": (
        "<tool_call><function=find><parameter=city>Tokyo</parameter><parameter=days>3</parameter></function></tool_call>",
        [_FIND],
    ),
    "a parameter that is not closed": (
        f"{_CODER_HEAD}<parameter=city>\nTokyo\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [_FIND],
    ),
    "the last parameter not closed": (
        f"{_CODER_HEAD}<parameter=city>\nTokyo\n</parameter>\n<parameter=days>\n3\n</function>\n</tool_call>",
        [_FIND],
    ),
    "two calls": (
        f"{_CODER_HEAD}<parameter=city>\nTokyo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [_FIND, _NOW],
    ),
    "a list of objects": (
        f"<tool_call>\n<function=ask>\n<parameter=questions>\n{json.dumps(_QUESTIONS['questions'])}\n</parameter>\n"
        "</function>\n</tool_call>",
        [("ask", _QUESTIONS)],
    ),
    "white space within a text": (
        f"{_CODER_HEAD}<parameter=city>\n  two\n    lines\n</parameter>\n</function>\n</tool_call>",
        [("find", {"city": "  two\n    lines"})],
    ),
}


@pytest.mark.parametrize("name", CODER)
def test_calls_of_qwen3_coder_are_parsed(name: str) -> None:
    text, calls = CODER[name]
    formats = OutputFormats(tool_call_parser="qwen3_coder")
    for pieces in [[text], list(text), *cuts(text, seed=1, count=3)]:
        read = read_pieces(pieces, formats, TOOLS)
        assert [(called, json.loads(arguments)) for called, arguments in read.calls] == calls, pieces
