"""Parses tool calls that are a list of Python's: [get_weather(city="Rome"), add(a=1, b=2)]. Each argument is emitted
when it is whole.

Llama 3.2, ToolACE and others write them so, Llama 4 also within <|python_start|> and <|python_end|>.

A list of Python may be an answer as well, so it contains calls if it begins with one of the request's tools.
"""

import json
from collections.abc import Mapping

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_reader import Recorder
from mini_infer_engine.parsing.python_literals import as_json
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSink, TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ToolCallFormat, ToolFormat

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonicFormat(ToolFormat):
    """A format of tool calls that is a list of Python's calls."""

    markers = (_BEGIN, _END)
    call_format = ToolCallFormat(
        calls_begin="[", after_name="(", after_arguments=")", separator=", ", calls_end="]", arguments="python"
    )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls in a list that begins with one of the tools, and the answer around them."""
        by_name = {tool.name: tool for tool in tools}
        while (marker := (yield from source.until((_BEGIN, "["), sink.content))) is not None:
            lead = ""
            if marker == _BEGIN:
                lead = source.take(len(_BEGIN)) + (yield from source.skip_space())
            if not (yield from source.accept("[")):
                sink.content(lead)
                continue
            lead += "[" + (yield from source.skip_space())
            yield from _read_calls(source, sink, by_name, lead)


def _read_calls(source: TextSource, sink: Sink, tools: Mapping[str, Tool], lead: str) -> Waiting[None]:
    """Parses calls up to the list's end. `lead` was read before; it is text if no call follows."""
    while True:
        name = yield from source.word()
        if name not in tools or not (yield from source.accept("(")):
            sink.content(lead + name)
            return
        sink.begin_call(name)
        if not (yield from _read_arguments(source, sink)):
            return
        lead = yield from source.skip_space()
        if not (yield from source.accept(",")):
            break
        lead += "," + (yield from source.skip_space())
    if (yield from source.accept("]")):
        yield from source.skip_space()
        yield from source.accept_end(_END)


def _read_arguments(source: TextSource, sink: Sink) -> Waiting[bool]:
    """Parses arguments up to the closing parenthesis. Returns False if the text ends before it, or goes on as no call
    does.
    """
    opening = "{"
    while True:
        yield from source.skip_space()
        if (yield from source.accept(")")):
            sink.arguments("{}" if opening == "{" else "}")
            return True
        key = yield from source.word()
        yield from source.skip_space()
        if not key or not (yield from source.accept("=")):
            return False
        value = Recorder()
        if not (yield from _read_value(source, value)):
            return False
        sink.arguments(f"{opening}{json.dumps(key)}: {as_json(value.text)}")
        opening = ", "
        yield from source.accept(",")


def _read_value(source: TextSource, emit: TextSink) -> Waiting[bool]:
    """Emits the expression up to the comma or parenthesis behind it. Returns False if the text ends within."""
    expected: list[str] = []
    while character := (yield from source.peek()):
        if not expected and character in (",", ")"):
            return True
        if character in ("'", '"'):
            if not (yield from _read_string(source, emit)):
                return False
            continue
        if character in _CLOSING:
            expected.append(_CLOSING[character])
        elif expected and character == expected[-1]:
            expected.pop()
        emit(source.take(1))
    return False


def _read_string(source: TextSource, emit: TextSink) -> Waiting[bool]:
    quote = source.take(1)
    emit(quote)
    while character := (yield from source.peek()):
        emit(source.take(1))
        if character == quote:
            return True
        if character == "\\":
            emit(source.take(len((yield from source.peek()))))
    return False
