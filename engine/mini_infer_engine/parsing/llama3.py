"""Parses tool calls in Llama 3's format: {"name": ..., "parameters": ...} without a marker, or behind <|python_tag|>.

Several stand behind each other with `;` between (https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1).
Some models write a list of them, too. As nothing marks them, an object is a call if it names one of the request's tools
and has parameters.
"""

from collections.abc import Container

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_calls import read_call
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ToolCallFormat, ToolFormat

_TAG = "<|python_tag|>"
_SEPARATOR = ";"


class Llama3Format(ToolFormat):
    """Llama 3's format of tool calls: JSON objects, with or without a marker."""

    markers = (_TAG,)
    call_format = ToolCallFormat(
        before_name='{"name": "',
        after_name='", "parameters": ',
        after_arguments="}",
        separator="; ",
        trigger='{"name": "',
    )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits objects that name one of the tools as calls, and the answer around them."""
        names = {tool.name for tool in tools}
        while (marker := (yield from source.until((_TAG, "[", "{"), sink.content))) is not None:
            lead = ""
            if marker == _TAG:
                lead = source.take(len(_TAG)) + (yield from source.skip_space())
            is_list = (yield from source.peek()) == "[" and (yield from source.is_followed("[", "{"))
            if is_list:
                lead += source.take(1) + (yield from source.skip_space())
            elif marker == "[":
                sink.content(source.take(1))
                continue
            yield from read_named_calls(source, sink, names, lead, "," if is_list else _SEPARATOR)


def read_named_calls(source: TextSource, sink: Sink, names: Container[str], lead: str, separator: str) -> Waiting[bool]:
    """Parses objects behind each other, with "," between them in a list. Returns True if one is a call.

    `lead` was read before; without a call it is text.
    """
    has_call = False
    while (yield from source.peek()) == "{":
        text = yield from read_call(source, sink, names)
        if text is not None:
            lead += text
            break
        has_call = True
        lead = yield from source.skip_space()
        if not (yield from source.accept(separator)):
            if separator == "," and (yield from source.accept("]")):
                lead = ""
            break
        lead += separator + (yield from source.skip_space())
    sink.content(lead)
    return has_call
