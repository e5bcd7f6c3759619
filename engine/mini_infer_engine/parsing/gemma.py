"""Parses tool calls in FunctionGemma's and Gemma 4's formats: call:NAME{KEY:VALUE,...} between markers.

Keys are bare, and a text of the family's own stands around strings, which have no escapes
(https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices).
"""

import json

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.json_reader import Recorder
from mini_infer_engine.parsing.python_literals import as_json
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSink, TextSource, Waiting
from mini_infer_engine.parsing.tool_format import QuotedArguments, ToolCallFormat, ToolFormat

_CALL = "call:"
_CLOSING = {"{": "}", "[": "]"}


class GemmaFormat(ToolFormat):
    """A format of tool calls with bare keys and quoted strings."""

    def __init__(self, begin: str, end: str, quote: str) -> None:
        """Takes the markers around a call, and the text around a string."""
        self._begin, self._end, self._quote = begin, end, quote
        self.markers = (begin, end, quote)
        self.call_format = ToolCallFormat(
            before_name=begin + _CALL,
            after_name="{",
            after_arguments="}" + end,
            trigger=begin,
            arguments=QuotedArguments(quote),
        )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls between the markers, and the answer around them."""
        while (yield from source.through((self._begin,), sink.content)) is not None:
            lead = self._begin + (yield from source.skip_space())
            if (yield from source.accept(_CALL)):
                lead += _CALL + (yield from source.skip_space())
                name = yield from source.word()
                lead += name
                if name and (yield from source.peek()) == "{":
                    sink.begin_call(name)
                    yield from _Object(source, sink.arguments, self._quote).read()
                    yield from source.skip_space()
                    yield from source.accept_end(self._end)
                    continue
            sink.content(lead)


class _Object:
    """Parses one object with all that is in it, and emits it as JSON. Nesting takes no stack of Python's."""

    def __init__(self, source: TextSource, emit: TextSink, quote: str) -> None:
        self._source = source
        self._emit = emit
        self._quote = quote
        self._closing: list[str] = []
        """Brackets that end what is open, the innermost last."""
        self._separator = ""
        """Text in front of the next member."""

    def read(self) -> Waiting[None]:
        """Reads from the opening bracket to the closing one, or to where it cannot go on."""
        self._open("", self._source.take(1))
        while self._closing:
            yield from self._source.skip_space()
            character = yield from self._source.peek()
            if character == ",":
                self._source.take(1)
            elif character == self._closing[-1]:
                self._emit(self._source.take(1))
                self._closing.pop()
                self._separator = ", "
            elif not character or character in "}]" or not (yield from self._read_member()):
                return

    def _open(self, before: str, bracket: str) -> None:
        self._emit(before + bracket)
        self._closing.append(_CLOSING[bracket])
        self._separator = ""

    def _read_member(self) -> Waiting[bool]:
        """Reads a key, if it is an object's member, and the beginning of a value, or all of it if it is none with
        members of its own. Returns False if it cannot go on.
        """
        before = self._separator
        if self._closing[-1] == "}":
            key = yield from self._read_key()
            if key is None:
                return False
            before += f"{json.dumps(key, ensure_ascii=False)}: "
        self._separator = ", "
        if (yield from self._source.accept(self._quote)):
            return (yield from self._read_string(before))
        character = yield from self._source.peek()
        if character in ("{", "["):
            self._open(before, self._source.take(1))
            return True
        return (yield from self._read_scalar(before))

    def _read_key(self) -> Waiting[str | None]:
        """Reads a key, with quotes or bare, and the colon. Returns None if there is none."""
        key = Recorder()
        if (yield from self._source.accept(self._quote)):
            if (yield from self._source.through((self._quote,), key)) is None:
                return None
            yield from self._source.skip_space()
        elif (yield from self._source.until((":", ",", "}", "{", "[", "]"), key)) is None:
            return None
        if not (yield from self._source.accept(":")):
            return None
        yield from self._source.skip_space()
        return key.text.strip()

    def _read_string(self, before: str) -> Waiting[bool]:
        self._emit(before + '"')
        whole = yield from self._source.through(
            (self._quote,), lambda text: self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        self._emit('"' if whole is not None else "")
        return whole is not None

    def _read_scalar(self, before: str) -> Waiting[bool]:
        """Reads a number, true, false or null; anything else is a string without quotes."""
        text = Recorder()
        if (yield from self._source.until((",", "}", "]"), text)) is None:
            return False
        self._emit(before + as_json(text.text))
        return True


FUNCTION_GEMMA = GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>')
