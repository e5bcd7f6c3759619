"""Parses tool calls in Mistral's format: [TOOL_CALLS] and a list of objects, or, from version 11 of its tokenizer on,
[TOOL_CALLS], a name, [ARGS] (from version 13 on) and the arguments (https://github.com/mistralai/mistral-common).
"""

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_calls import read_calls
from mini_infer_engine.parsing.json_reader import read_value
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ToolCallFormat, ToolFormat

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralFormat(ToolFormat):
    """Mistral's format of tool calls, in all its versions."""

    markers = (_CALLS, _ID, _ARGUMENTS)
    id_prefix, id_length = "", 9  # its templates refuse others when a call comes back in a conversation

    def __init__(self, call_format: ToolCallFormat) -> None:
        """Takes the form that the model was trained on; both forms are parsed."""
        self.call_format = call_format

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls behind [TOOL_CALLS], and the answer around them."""
        while (yield from source.through((_CALLS,), sink.content)) is not None:
            lead = _CALLS + (yield from source.skip_space())
            if (yield from source.peek()) in ("[", "{"):
                yield from read_calls(source, sink, lead)
            else:
                yield from _read_named(source, sink, lead)


LIST_FORM = ToolCallFormat(
    calls_begin=f"{_CALLS} [",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_arguments="}",
    separator=", ",
    calls_end="]",
    trigger=_CALLS,
)
NAME_FORM = ToolCallFormat(before_name=_CALLS, after_name="", trigger=_CALLS)
NAME_AND_MARKER_FORM = ToolCallFormat(before_name=_CALLS, after_name=_ARGUMENTS, trigger=_CALLS)


def _read_named(source: TextSource, sink: Sink, lead: str) -> Waiting[None]:
    """Parses a name and arguments. `lead` was read before; it is text if none follow."""
    name = yield from source.word()
    lead += name
    if (yield from source.accept(_ID)):
        lead += _ID + (yield from source.word())
    if (yield from source.accept(_ARGUMENTS)):
        lead += _ARGUMENTS
    if not name or (yield from source.peek()) != "{":
        sink.content(lead)
        return
    sink.begin_call(name)
    yield from read_value(source, sink.arguments)
