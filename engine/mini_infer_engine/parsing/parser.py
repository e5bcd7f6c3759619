"""Builds the parser of one choice from a model's formats and the request's needs."""

from mini_infer_engine.parsing.base import OutputParsing, Part
from mini_infer_engine.parsing.harmony import HARMONY_REASONING, MARKERS, HarmonyFormat, position_after, read_messages
from mini_infer_engine.parsing.reasoning import begins_inside, read_reasoning
from mini_infer_engine.parsing.registry import OutputFormats
from mini_infer_engine.parsing.sink import MessageSink, Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting
from mini_infer_web.api_errors import ApiError


def check_parsing(formats: OutputFormats, parsing: OutputParsing) -> None:
    """Raises ApiError if a request needs tool calls that this model's format does not have, or that are
    switched off.
    """
    if parsing.tools and formats.tools is None:
        raise ApiError(
            400,
            "tools need a parser for this model's calls, and its chat template shows no format that is known: start "
            "the server with --tool-call-parser, or leave tools out",
            param="tools",
            code="no_tool_call_parser",
        )
    if parsing.tools and parsing.tool_choice == "auto" and not formats.enable_auto_tool_choice:
        message = (
            "tool_choice auto is switched off here (--no-enable-auto-tool-choice): choose a tool, required or none"
        )
        raise ApiError(400, message, param="tool_choice", code="unsupported_value")


def markers(formats: OutputFormats, parsing: OutputParsing) -> tuple[str, ...]:
    """Returns texts that the parser must see, also if they are special tokens."""
    if formats.is_harmony:
        return MARKERS
    of_reasoning = () if formats.reasoning is None else (formats.reasoning.begin, formats.reasoning.end)
    return of_reasoning + (formats.tools.markers if formats.tools is not None and parsing.tools else ())


class FormatParser:
    """An `OutputParser` of a model's formats."""

    __slots__ = ("_reader", "_sink", "_source")

    def __init__(self, formats: OutputFormats, parsing: OutputParsing, prompt_end: str = "") -> None:
        """Takes the formats, the request's needs, and `prompt_end`, the last words of the prompt with special tokens
        shown.
        """
        self._source = TextSource()
        sink = MessageSink if formats.is_harmony else Sink
        self._sink = sink(looks_for_calls=False)
        if parsing.tools and formats.tools is not None:
            style = formats.tools
            is_free = parsing.tool_choice == "auto"
            self._sink = sink(True, style.id_prefix, style.id_length, emits_content=is_free)
        self._reader = _read(self._source, self._sink, formats, parsing, prompt_end)
        next(self._reader)

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends within reasoning."""
        return self._sink.is_reasoning

    def push(self, text: str) -> list[Part]:
        """Feeds a piece of text to the format's reader. Returns the parts that have become certain."""
        if text:
            self._source.feed(text)
            next(self._reader)
        return self._sink.drain()

    def finish(self) -> list[Part]:
        """Lets the format's reader run to the end. Returns the remaining parts."""
        self._source.close()
        for _ in self._reader:
            pass
        self._sink.finish()
        return self._sink.drain()


def _read(
    source: TextSource, sink: Sink, formats: OutputFormats, parsing: OutputParsing, prompt_end: str
) -> Waiting[None]:
    if formats.is_harmony:
        called = parsing.tools if isinstance(formats.tools, HarmonyFormat) else ()
        has_reasoning = formats.reasoning is HARMONY_REASONING
        position = position_after(prompt_end)
        yield from read_messages(source, sink, called, has_reasoning=has_reasoning, position=position)
        return
    tools = formats.tools if parsing.tools else None
    if (reasoning := formats.reasoning) is not None:
        is_inside = begins_inside(reasoning, parsing.continued_text, prompt_end)
        call = None if tools is None else tools.ends_thinking
        yield from read_reasoning(source, sink, reasoning, is_inside, call)
    if tools is not None:
        yield from tools.read(source, sink, parsing.tools)
    yield from source.through([], sink.content)
