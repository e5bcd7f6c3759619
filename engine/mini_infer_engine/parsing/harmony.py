"""Parses harmony, the response format of gpt-oss: an output is a series of messages, each with a channel.

Messages in the channel `analysis` are reasoning, those to a function are tool calls, all others are the answer
(https://github.com/openai/harmony, docs/format.md). White space in a message is part of its text.
"""

import re
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSink, TextSource, Waiting
from mini_infer_engine.parsing.tool_format import ReasoningFormat, ToolCallFormat, ToolFormat

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
STOPS = (CALL, RETURN)
"""Tokens that end an output: behind a call, and behind the final message."""
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, *STOPS)
NEXT_MESSAGE = f"{END}{START}assistant"
"""Text between two messages of one output."""
FINAL = f"{CHANNEL}final{MESSAGE}"
HARMONY_REASONING = ReasoningFormat(f"{CHANNEL}analysis{MESSAGE}", END)

_ENDS = (END, *STOPS)
_RECIPIENT = "to="
_FUNCTIONS = "functions."
_LONGEST_HEADER = 256
"""Characters behind which text without `<|message|>` is no header."""


class Position(Enum):
    """The place within a message where a prompt ends and the output begins."""

    HEADER = "header"
    ANALYSIS = "analysis"
    ANSWER = "answer"


def position_after(prompt_end: str) -> Position:
    """Returns the place where an output begins; `prompt_end` are the last words of the prompt, special tokens shown.

    A template's generation prompt ends in front of a header. One that opens a channel, and a message that is to be
    continued, end within a message.
    """
    if not prompt_end or prompt_end.rstrip().endswith(f"{START}assistant"):
        return Position.HEADER
    opened = prompt_end[prompt_end.rfind(START) + 1 :]
    return Position.ANALYSIS if HARMONY_REASONING.begin in opened else Position.ANSWER


class _Header(NamedTuple):
    """The text in front of `<|message|>`."""

    role: str
    channel: str
    recipient: str


class HarmonyFormat(ToolFormat):
    """Harmony's format of tool calls: messages to functions.NAME."""

    markers = MARKERS
    call_format = ToolCallFormat(
        before_name=f"{CHANNEL}commentary {_RECIPIENT}{_FUNCTIONS}",
        after_name=f" {CONSTRAIN}json{MESSAGE}",
        separator=NEXT_MESSAGE,
        trigger=f"{CHANNEL}commentary {_RECIPIENT}{_FUNCTIONS}",
    )

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls, and everything else as the answer: analysis, too, since no parser of reasoning was chosen."""
        yield from read_messages(source, sink, tools, has_reasoning=False)


def read_messages(
    source: TextSource,
    sink: Sink,
    tools: tuple[Tool, ...],
    *,
    has_reasoning: bool = True,
    position: Position = Position.HEADER,
) -> Waiting[None]:
    """Emits all messages of an output. Without `tools` there are no calls, and what looks like one is the answer.

    `has_reasoning`: analysis is reasoning; otherwise it is part of the answer. Messages of another role than the
    assistant's, which a model has made up, are left out. Text that has no header is the answer.
    """
    messages = _Messages(source, sink, tools, has_reasoning)
    if position is Position.ANALYSIS:
        yield from messages.read_content(_Header("assistant", "analysis", ""))
    while not source.is_closed or source.available:
        yield from messages.read_message()


class _Messages:
    """Reads one message after the other."""

    def __init__(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...], has_reasoning: bool) -> None:
        self._source = source
        self._sink = sink
        self._has_tools = bool(tools)
        self._names = {tool.name for tool in tools}
        self._has_reasoning = has_reasoning

    def read_message(self) -> Waiting[None]:
        """Reads a header, if there is one, and the message's text."""
        space = yield from self._source.skip_space()
        text = ""
        for opening in (CHANNEL, START, CONSTRAIN, MESSAGE, _RECIPIENT):
            if (yield from self._source.accept(opening)):
                header, text = yield from self._read_header(opening)
                if header is not None:
                    yield from self.read_content(header)
                    return
                break
        if text.startswith("<|") and self._source.is_closed and not self._source.available:
            return  # the output was cut within a header
        yield from self.read_content(_Header("assistant", "", ""), space + text)

    def _read_header(self, opening: str) -> Waiting[tuple[_Header | None, str]]:
        """Returns the header and its text. There is none if the text ends before, or is too long for a header."""
        text = opening
        while not text.endswith(MESSAGE):
            character = yield from self._source.peek()
            if not character or len(text) > _LONGEST_HEADER:
                return None, text
            if (yield from self._source.accept(MESSAGE)):
                text += MESSAGE
            else:
                text += self._source.take(1)
        return _parsed_header(text), text

    def read_content(self, header: _Header, text: str = "") -> Waiting[None]:
        """Emits a message's text up to its end, and reads the marker there. `text` was read before."""
        emit = self._begin(header)
        if text:
            emit(text)
        while (marker := (yield from self._source.until(_ENDS, emit))) is not None:
            if (yield from self._is_end(marker)):
                self._source.take(len(marker))
                break
            emit(self._source.take(len(marker)))  # only a mention
        self._end(emit)

    def _is_end(self, marker: str) -> Waiting[bool]:
        """True if the next message's beginning or nothing stands behind the marker."""
        ahead = yield from self._source.peek(len(marker) + max(len(START), len(CHANNEL)))
        rest = ahead[len(marker) :]
        return not rest or rest.startswith((START, CHANNEL))

    def _begin(self, header: _Header) -> TextSink:
        """Returns the function that takes the text of a message."""
        sink, name = self._sink, self._function(header.recipient)
        if header.role != "assistant":
            return _dropped
        if name:
            sink.begin_call(name)
            return _Arguments(sink.arguments)
        runs_inside = bool(header.recipient) and not self._is_function(header.recipient)
        if self._has_reasoning and (header.channel == "analysis" or runs_inside):
            sink.begin_reasoning()
            return sink.reasoning
        sink.end_reasoning()
        return sink.content

    def _end(self, emit: TextSink) -> None:
        if isinstance(emit, _Arguments) and not emit.has_some:
            emit("{}")
        if self._sink.is_reasoning:
            self._sink.end_reasoning()

    def _function(self, recipient: str) -> str:
        """Returns the name of the function that is called, or "" if none is."""
        if not self._has_tools or not self._is_function(recipient):
            return ""
        return recipient.removeprefix(_FUNCTIONS)

    def _is_function(self, recipient: str) -> bool:
        return recipient.startswith(_FUNCTIONS) or recipient in self._names


class _Arguments:
    """Passes arguments on, and records if there were any."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self.has_some = False

    def __call__(self, text: str) -> None:
        self.has_some = True
        self._emit(text)


def _dropped(_text: str) -> None:
    """Takes text that is shown nowhere."""


_WORD = r"([^\s<]*)"
_ROLE, _CHANNEL, _TO = (re.compile(prefix + _WORD) for prefix in (re.escape(START), re.escape(CHANNEL), _RECIPIENT))


def _parsed_header(text: str) -> _Header:
    """Returns the fields of a header. Its recipient may stand behind the role or behind the channel."""
    role, channel, recipient = (
        found[-1] if (found := pattern.findall(text)) else "" for pattern in (_ROLE, _CHANNEL, _TO)
    )
    return _Header(role or "assistant", channel, recipient)
