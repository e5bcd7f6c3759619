r"""Collects the parts that readers emit: numbers and names calls, and drops white space that only separates parts.
Knows no format.

White space around markers is layout, not answer: "Let me look.\n<tool_call>..." answers "Let me look.", and an output
of nothing but calls has no content at all. Without a marker nothing is dropped.
"""

import secrets
import string

from mini_infer_engine.parsing.base import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from mini_infer_engine.parsing.json_text import JsonText

_ID_CHARACTERS = string.ascii_letters + string.digits


class Sink:
    """Collects the parts of one output, in order."""

    __slots__ = (
        "_arguments",
        "_buffered",
        "_emits_content",
        "_has_emitted_content",
        "_id_length",
        "_id_prefix",
        "_looks_for_calls",
        "_num_calls",
        "_parts",
        "_skips_space",
        "is_reasoning",
    )

    def __init__(
        self, looks_for_calls: bool, id_prefix: str = "call_", id_length: int = 24, *, emits_content: bool = True
    ) -> None:
        """Drops the answer if `emits_content` is False: then there is nothing but calls, and what looks like an answer
        is a call that was cut.
        """
        self.is_reasoning = False
        self._looks_for_calls = looks_for_calls
        """True if calls may follow; otherwise white space in the answer can stand before nothing but more answer, and
        none is buffered.
        """
        self._emits_content = emits_content
        self._id_prefix, self._id_length = id_prefix, id_length
        self._parts: list[Part] = []
        self._arguments = JsonText()
        """Arguments of the call that began last."""
        self._num_calls = 0
        self._buffered = ""
        """White space at the end of the text so far: it is emitted once text follows."""
        self._skips_space = False
        """True if the text follows a marker."""
        self._has_emitted_content = False

    def drain(self) -> list[Part]:
        """Returns the parts since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def begin_reasoning(self) -> None:
        """Begins reasoning: its opening marker was read, or stands at the prompt's end."""
        self.is_reasoning, self._skips_space, self._buffered = True, True, ""

    def reasoning(self, text: str) -> None:
        """Adds a piece of reasoning."""
        if certain := self._without_outer_space(text):
            self._parts.append(Reasoning(certain))

    def end_reasoning(self) -> None:
        """Ends reasoning: its closing marker was read."""
        self.is_reasoning, self._skips_space, self._buffered = False, True, ""

    def content(self, text: str) -> None:
        """Adds a piece of the answer."""
        if self._emits_content and (certain := self._without_outer_space(text)):
            self._has_emitted_content = True
            self._parts.append(Content(certain))

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begins a call of this function; its arguments follow. Makes an id if the model has written none."""
        if not self._has_emitted_content:
            self._buffered = ""
        self._end_arguments()
        if call_id is None:
            call_id = self._id_prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self._id_length))
        self._parts.append(ToolCallBegin(self._num_calls, call_id, name))
        self._num_calls += 1
        self._skips_space = True

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that began last, as JSON text."""
        if certain := self._arguments.push(text):
            self._parts.append(ToolCallArguments(self._num_calls - 1, certain))

    def finish(self) -> None:
        """Ends the output: white space at its end is part of it, unless a marker stands before it."""
        self._end_arguments()
        if self._buffered and not self._skips_space:
            self._parts.append(Reasoning(self._buffered) if self.is_reasoning else Content(self._buffered))
        self._buffered = ""

    def _end_arguments(self) -> None:
        if left := self._arguments.finish():
            self._parts.append(ToolCallArguments(self._num_calls - 1, left))
        self._arguments = JsonText()

    def _without_outer_space(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            if not text:
                return ""
            self._skips_space = False
        if not (self._looks_for_calls or self.is_reasoning):
            return text
        text = self._buffered + text
        certain = text.rstrip()
        self._buffered = text[len(certain) :]
        return certain


class MessageSink(Sink):
    """A sink for formats whose parts are whole messages: white space is text, and several messages of one kind have a
    line end between them.
    """

    __slots__ = ("_has_emitted_reasoning", "_separator")

    def __init__(
        self, looks_for_calls: bool, id_prefix: str = "call_", id_length: int = 24, *, emits_content: bool = True
    ) -> None:
        super().__init__(looks_for_calls, id_prefix, id_length, emits_content=emits_content)
        self._has_emitted_reasoning = False
        self._separator = ""
        """Text between the messages before and the next one, which is emitted once text of that follows."""

    def begin_reasoning(self) -> None:
        """Begins a message of reasoning."""
        self.is_reasoning, self._separator = True, "\n" if self._has_emitted_reasoning else ""

    def end_reasoning(self) -> None:
        """Ends a message of reasoning, and begins one of the answer."""
        self.is_reasoning, self._separator = False, "\n" if self._has_emitted_content else ""

    def _without_outer_space(self, text: str) -> str:
        text, self._separator = self._separator + text, ""
        self._has_emitted_reasoning |= self.is_reasoning
        return text
