"""Parses tool calls in xLAM's format: a JSON list of objects without a marker, [{"name": ..., "arguments": {...}}].

Some of its models write the list in a block of code, or behind [TOOL_CALLS]. As nothing certain marks calls, an object
is one if it names one of the request's tools and has arguments.
"""

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.llama3 import read_named_calls
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ToolCallFormat, ToolFormat

_MARKER = "[TOOL_CALLS]"
_CODE, _LANGUAGE = "```", "json"


class XlamFormat(ToolFormat):
    """xLAM's format of tool calls."""

    markers = (_MARKER,)
    call_format = ToolCallFormat(
        calls_begin="[",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_arguments="}",
        separator=", ",
        calls_end="]",
        trigger='[{"name": "',
    )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits objects that name one of the tools as calls, and the answer around them."""
        names = {tool.name for tool in tools}
        while (marker := (yield from source.until((_CODE, "[", "{"), sink.content))) is not None:
            lead = ""
            if marker == _CODE:
                lead = source.take(len(_CODE))
                lead += _LANGUAGE if (yield from source.accept(_LANGUAGE)) else ""
                lead += yield from source.skip_space()
            if (yield from source.accept(_MARKER)):
                lead += _MARKER + (yield from source.skip_space())
            is_list = (yield from source.peek()) == "[" and (yield from source.is_followed("[", "{"))
            if is_list:
                lead += source.take(1) + (yield from source.skip_space())
            elif (yield from source.peek()) != "{":
                sink.content(lead or source.take(1))
                continue
            has_call = yield from read_named_calls(source, sink, names, lead, "," if is_list else ";")
            if has_call and marker == _CODE:
                yield from source.skip_space()
                yield from source.accept_end(_CODE)
