"""Parses tool calls in Qwen3-Coder's format:
<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.

Values are texts without quotes (https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct); the function's schema says
which type they are in JSON. Texts are emitted as they come, other values when they are whole.
"""

import json
from typing import Any

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_reader import Recorder
from mini_infer_engine.parsing.python_literals import as_json
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSink, TextSource, Waiting
from mini_infer_engine.parsing.tool_format import CallOpening, ToolCallFormat, ToolFormat

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderFormat(ToolFormat):
    """Qwen3-Coder's format of tool calls: functions and parameters in tags."""

    markers = (_BEGIN, _END)
    ends_thinking = CallOpening(_BEGIN, _FUNCTION)
    call_format = ToolCallFormat(
        before_name=f"{_BEGIN}\n{_FUNCTION}",
        after_name=">\n",
        after_arguments=f"{_FUNCTION_END}\n{_END}",
        separator="\n",
        trigger=_BEGIN,
        arguments="xml",
    )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls and the answer around them. Some models leave out the outer markers: then the function must be
        one of the tools.
        """
        by_name = {tool.name: tool for tool in tools}
        is_open = False
        while (marker := (yield from source.through((_BEGIN, _END, _FUNCTION), sink.content))) is not None:
            if marker == _END:
                sink.content("" if is_open else _END)
                is_open = False
                continue
            lead = marker
            if marker == _BEGIN:
                lead += yield from source.skip_space()
                if not (yield from source.accept(_FUNCTION)):
                    sink.content(lead)
                    continue
                lead += _FUNCTION
            name = yield from source.word()
            if not name or (marker == _FUNCTION and name not in by_name) or not (yield from source.accept(">")):
                sink.content(lead + name)
                continue
            yield from _read_parameters(source, sink, name, by_name.get(name))
            is_open = not (yield from source.accept_end(_END))


def _read_parameters(source: TextSource, sink: Sink, name: str, tool: Tool | None) -> Waiting[None]:
    sink.begin_call(name)
    schemas = tool.parameters.get("properties") if tool is not None else None
    opening = "{"
    while True:
        yield from source.skip_space()
        if not (yield from source.accept(_PARAMETER)):
            break
        key = Recorder()
        if (yield from source.through((">",), key)) is None:
            return
        sink.arguments(f"{opening}{json.dumps(key.text, ensure_ascii=False)}: ")
        opening = ", "
        schema = schemas.get(key.text) if isinstance(schemas, dict) else None
        if not (yield from _read_parameter(source, sink, _types(schema))):
            return
    if (yield from source.accept_end(_FUNCTION_END)) or (yield from source.peek()):
        sink.arguments("{}" if opening == "{" else "}")
    yield from source.skip_space()


def _read_parameter(source: TextSource, sink: Sink, types: set[str]) -> Waiting[bool]:
    """Parses one parameter. Returns False if the text ended within."""
    if types <= {"string"}:
        value = _Text(sink.arguments)
        sink.arguments('"')
        end = yield from source.until((_PARAMETER_END, _PARAMETER, _FUNCTION_END), value)
        sink.arguments('"' if end is not None else "")
    else:
        whole = Recorder()
        end = yield from source.until((_PARAMETER_END, _PARAMETER, _FUNCTION_END), whole)
        text = whole.text.removeprefix("\n").removesuffix("\n")
        sink.arguments(_as_json(text, types) if end is not None else "")
    if end == _PARAMETER_END:
        source.take(len(_PARAMETER_END))
    return end is not None


class _Text:
    """Emits a text as the inside of a JSON string, without a line's end at its beginning and its end."""

    def __init__(self, emit: TextSink) -> None:
        self._emit = emit
        self._buffered = ""
        self._has_begun = False

    def __call__(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        text = self._buffered + text
        self._buffered = "\n" if text.endswith("\n") else ""
        self._emit(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def _types(schema: Any) -> set[str]:
    """Returns the types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    found = schema.get("type")
    types = set(found) if isinstance(found, list) else {found} if isinstance(found, str) else set()
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(part) or {"object"}
    for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])):
        types.add("string" if isinstance(value, str) else "null" if value is None else "number")
    return types or ({"object"} if schema.keys() & {"properties", "$ref", "allOf", "items"} else set())


def _as_json(text: str, types: set[str]) -> str:
    if text.strip().lower() in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if "string" in types and types <= {"string", "null"}:
        return json.dumps(text, ensure_ascii=False)
    return as_json(text)
