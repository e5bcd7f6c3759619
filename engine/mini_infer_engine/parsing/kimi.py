"""Parses tool calls in Kimi K2's format: an id that contains the name, functions.NAME:NUMBER, and JSON.

The number counts the calls of a conversation. Templates show ids in the history, so the answer has the ids that the
model wrote (https://huggingface.co/moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md).
"""

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_reader import read_value
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import CallOpening, ToolCallFormat, ToolFormat

_CALLS_BEGIN, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_BEGIN, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_FUNCTIONS = "functions."


class KimiFormat(ToolFormat):
    """Kimi K2's format of tool calls."""

    markers = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _ARGUMENTS)
    ends_thinking = CallOpening(_CALLS_BEGIN, _CALL_BEGIN)
    call_format = ToolCallFormat(
        calls_begin=_CALLS_BEGIN,
        before_name=_CALL_BEGIN + _FUNCTIONS,
        has_number=True,
        after_name=_ARGUMENTS,
        after_arguments=_CALL_END,
        calls_end=_CALLS_END,
        trigger=_CALLS_BEGIN,
    )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls between the markers, and the answer around them."""
        ids: set[str] = set()
        is_open = False
        while (
            marker := (yield from source.through((_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN), sink.content))
        ) is not None:
            if marker == _CALLS_END:
                sink.content("" if is_open else _CALLS_END)
                is_open = False
                continue
            lead = marker
            if marker == _CALLS_BEGIN:
                lead += yield from source.skip_space()
                if not (yield from source.accept(_CALL_BEGIN)):
                    sink.content(lead)
                    continue
                lead += _CALL_BEGIN
            text = yield from _read_call(source, sink, ids)
            sink.content("" if text is None else lead + text)
            is_open = text is None and not (yield from source.accept_end(_CALLS_END))


def _read_call(source: TextSource, sink: Sink, ids: set[str]) -> Waiting[str | None]:
    """Parses one call behind its first marker. Returns the text that was read if it is none.

    An id that another call of the output has, or that has no number, is left to the sink to make.
    """
    read = yield from source.skip_space()
    written = yield from source.word()
    read += written
    name = written.removeprefix(_FUNCTIONS)
    if has_number := (yield from source.accept(":")):
        number = yield from source.word()
        read += f":{number}"
        written += f":{number}"
        has_number = number.isdigit()
    read += yield from source.skip_space()
    if not name or not (yield from source.accept(_ARGUMENTS)):
        return read
    sink.begin_call(name, written if has_number and written not in ids else None)
    ids.add(written)
    yield from source.skip_space()
    yield from read_value(source, sink.arguments)
    yield from source.skip_space()
    yield from source.accept_end(_CALL_END)
    yield from source.skip_space()
    return None
