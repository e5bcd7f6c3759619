"""Parses tool calls in Hermes' and Qwen's format: <tool_call>{"name": ..., "arguments": ...}</tool_call>.

The format is Nous Research's (github.com/NousResearch/Hermes-Function-Calling); Qwen 2.5, Qwen 3 and the demo model
share it. Each pair has one object; if a model writes several, or a list of them, all are calls.
"""

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_calls import read_call
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import CallOpening, ToolCallFormat, ToolFormat

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """Hermes' format of tool calls: JSON objects between <tool_call> and </tool_call>."""

    markers = (_BEGIN, _END)
    ends_thinking = CallOpening(_BEGIN, "{")
    call_format = ToolCallFormat(
        before_name=f'{_BEGIN}\n{{"name": "',
        after_name='", "arguments": ',
        after_arguments=f"}}\n{_END}",
        separator="\n",
        trigger=_BEGIN,
    )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls between <tool_call> and </tool_call>, and the answer around them."""
        is_open = False
        while (marker := (yield from source.through((_BEGIN, _END), sink.content))) is not None:
            if marker == _END:
                sink.content("" if is_open else _END)
                is_open = False
                continue
            is_open = yield from _read_calls(source, sink, _BEGIN + (yield from source.skip_space()))


def _read_calls(source: TextSource, sink: Sink, lead: str) -> Waiting[bool]:
    """Parses the objects of one pair and the closing marker. Returns True if that is missing behind a call.

    `lead` was read before; it is text if no call follows.
    """
    is_list = yield from source.accept("[")
    if is_list:
        lead += "[" + (yield from source.skip_space())
    has_call = False
    while True:
        text = yield from read_call(source, sink)
        if text is not None:
            sink.content(lead + text)
            return has_call
        has_call = True
        lead = yield from source.skip_space()
        if (yield from source.accept(",")):
            lead += "," + (yield from source.skip_space())
        elif is_list and (yield from source.accept("]")):
            lead = yield from source.skip_space()
            is_list = False
        if (yield from source.peek()) != "{":
            if (yield from source.accept_end(_END)):
                return False
            sink.content(lead)
            return True
