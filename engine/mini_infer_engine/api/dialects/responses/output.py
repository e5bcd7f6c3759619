"""Writes parts of a model's output as the items of a response: opens, fills and ends each. Knows no request."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_engine.api.dialects.openai.text_logprobs import TextLogprobs
from mini_infer_engine.api.dialects.responses.items import (
    CustomCallItem,
    EventWriter,
    FunctionCallItem,
    Logprobs,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ReasoningSummaryItem,
)
from mini_infer_engine.parsing.base import Content, ParsedOutput, Part, Reasoning, ToolCallArguments, ToolCallBegin


class ResponseOutput:
    """The items of a response so far. Methods return the events of the parts that they add."""

    def __init__(
        self,
        events: EventWriter,
        *,
        custom_tools: frozenset[str] = frozenset(),
        namespaces: Mapping[str, tuple[str, str]] | None = None,
        summary: bool = False,
        sealed: bool = False,
    ) -> None:
        """Takes `namespaces`, the namespace and the name there of a function by its name. If `summary`, reasoning is
        sent as one.

        If `sealed`, it also has `encrypted_content`.
        """
        self.items: list[dict[str, Any]] = []
        """Items that are complete."""
        self._events = events
        self._custom_tools, self._summary, self._sealed = custom_tools, summary, sealed
        self._namespaces = namespaces or {}
        self._open: OutputItem | None = None
        self._logprobs = TextLogprobs()

    def push(self, parts: Sequence[Part], logprobs: Logprobs) -> bytes:
        """Returns the events of new parts; `logprobs` of the tokens that made them are emitted with the text that they
        belong to.

        Without text among the parts they belong to reasoning or to a call; without any part, to text that may still
        come.
        """
        if logprobs:
            self._logprobs.push(logprobs)
        if parts and not any(isinstance(part, Content) for part in parts):
            self._end_text()
        return b"".join([self._push(part) for part in parts])

    def _push(self, part: Part) -> bytes:
        match part:
            case Content(text):
                begun = self._in(MessageItem)
                return begun + self._piece(text, self._logprobs.take(text))
            case Reasoning(text):
                return self._in(ReasoningItem) + self._piece(text)
            case ToolCallBegin(_, _, name):  # Another id: one that other engines would give it, too.
                return self._begin(self._call(name))
            case ToolCallArguments(_, text):
                return self._piece(text)

    def end(self, status: str) -> bytes:
        """Ends the open item with this status; an answer without anything is an empty message."""
        nothing = self._in(MessageItem) if not self.items and self._open is None else b""
        return nothing + self._close(status)

    def _in(self, kind: type[OutputItem]) -> bytes:
        """Returns the events until an item of this kind is open."""
        if isinstance(self._open, kind):
            return b""
        if kind is MessageItem:
            return self._begin(MessageItem(self._events, self._next_index))
        thinking = ReasoningSummaryItem if self._summary else ReasoningItem
        return self._begin(thinking(self._events, self._next_index, sealed=self._sealed))

    def _call(self, name: str) -> OutputItem:
        if name in self._custom_tools:
            return CustomCallItem(self._events, self._next_index, name)
        namespace, own_name = self._namespaces.get(name, (None, name))
        return FunctionCallItem(self._events, self._next_index, own_name, namespace)

    def _piece(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        assert self._open is not None, "a call's arguments come after its beginning"
        return self._open.push(text, logprobs or [])

    @property
    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: OutputItem) -> bytes:
        closed = self._close("completed")
        self._open = item
        return closed + item.begin()

    def _end_text(self) -> None:
        last = self._logprobs.finish()
        if isinstance(self._open, MessageItem):
            self._open.add_logprobs(last)

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        if isinstance(self._open, MessageItem):
            self._end_text()
        item, self._open = self._open, None
        self.items.append(item.shown(status))
        return item.end(status)


def parts_of(parsed: ParsedOutput) -> list[Part]:
    """Returns a whole output as parts, in the order of OpenAI's items: reasoning, answer, calls."""
    parts: list[Part] = []
    if parsed.reasoning:
        parts.append(Reasoning(parsed.reasoning))
    if parsed.content:
        parts.append(Content(parsed.content))
    for index, call in enumerate(parsed.tool_calls):
        parts += [ToolCallBegin(index, call.id, call.name), ToolCallArguments(index, call.arguments)]
    return parts
