"""Parses tool calls in DeepSeek's formats: V3 and R1 with a type and a block of code, V3.1 with name and arguments
alone.

Templates and tokens: https://huggingface.co/deepseek-ai/DeepSeek-V3-0324,
https://huggingface.co/deepseek-ai/DeepSeek-V3.1.
"""

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_reader import read_value
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ToolCallFormat, ToolFormat

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CODE_BEGIN, _CODE_END = "```json", "```"

V3_FORM = ToolCallFormat(
    calls_begin=_CALLS_BEGIN,
    before_name=f"{_CALL_BEGIN}function{_SEPARATOR}",
    after_name=f"\n{_CODE_BEGIN}\n",
    after_arguments=f"\n{_CODE_END}{_CALL_END}",
    separator="\n",
    calls_end=_CALLS_END,
    trigger=_CALLS_BEGIN,
)
V31_FORM = ToolCallFormat(
    calls_begin=_CALLS_BEGIN,
    before_name=_CALL_BEGIN,
    after_name=_SEPARATOR,
    after_arguments=_CALL_END,
    calls_end=_CALLS_END,
    trigger=_CALLS_BEGIN,
)


class DeepSeekFormat(ToolFormat):
    """DeepSeek's format of tool calls, in both its forms."""

    markers = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)

    def __init__(self, call_format: ToolCallFormat) -> None:
        """Takes the form that the model was trained on; both forms are parsed."""
        self.call_format = call_format

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls between DeepSeek's special tokens, and the answer around them."""
        while (marker := (yield from source.through((_CALLS_BEGIN, _CALL_BEGIN), sink.content))) is not None:
            lead = marker + (yield from source.skip_space())
            yield from _read_calls(source, sink, lead)


def _read_calls(source: TextSource, sink: Sink, lead: str) -> Waiting[None]:
    """Parses calls up to the marker of their end. `lead` was read before; it is text if no call follows."""
    while True:
        if (yield from source.accept(_CALL_BEGIN)):
            lead += _CALL_BEGIN
        text = yield from _read_call(source, sink)
        if text is not None:
            sink.content(lead + text)
            return
        lead = yield from source.skip_space()
        is_last = yield from source.accept_end(_CALLS_END)
        if is_last or (yield from source.peek(len(_CALL_BEGIN))) != _CALL_BEGIN:
            return


def _read_call(source: TextSource, sink: Sink) -> Waiting[str | None]:
    """Parses one call behind its first marker. Returns the text that was read if it is none."""
    head = yield from source.word()
    if not head or not (yield from source.accept(_SEPARATOR)):
        return head
    name, read = head, head + _SEPARATOR
    if (yield from source.peek()) != "{":
        name = yield from source.word()
        space = yield from source.skip_space()
        read += name + space
        if not name or not (yield from source.accept(_CODE_BEGIN)):
            return read
        yield from source.skip_space()
    sink.begin_call(name)
    yield from read_value(source, sink.arguments)
    yield from source.skip_space()
    yield from source.accept_end(_CODE_END)
    yield from source.accept_end(_CALL_END)
    return None
