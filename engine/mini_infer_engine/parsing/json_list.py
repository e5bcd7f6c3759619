"""Parses tool calls that are a list of JSON objects behind a marker: Granite's <|tool_call|>[...], Phi-4-mini's
functools[...].
"""

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_calls import read_calls
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ToolCallFormat, ToolFormat


class JsonListFormat(ToolFormat):
    """A format of tool calls that is a list of JSON objects behind a marker."""

    def __init__(self, *markers: str) -> None:
        """Takes markers, any of which begins calls; the first is the one that the model was trained on."""
        self.markers = markers
        self.call_format = ToolCallFormat(
            calls_begin=f"{markers[0]}[",
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
            separator=", ",
            calls_end="]",
            trigger=f"{markers[0]}[",
        )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls behind one of the markers, and the answer around them."""
        while (marker := (yield from source.through(self.markers, sink.content))) is not None:
            lead = marker + (yield from source.skip_space())
            yield from read_calls(source, sink, lead)
