"""Parts of a model's output, which are reasoning, answer and tool calls: the interface between parsers and renderers.

Knows no model's format and no client's: parsers make these parts of text, renderers make answers of these parts.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a call; the calls of one output are numbered from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Reasoning | Content | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Parses the text of one choice as it comes. The result does not depend on how the text is cut into pieces, except
    for the pieces' own cuts.
    """

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends within reasoning."""

    def push(self, text: str) -> list[Part]:
        """Takes a piece of text. Returns the parts that have become certain."""

    def finish(self) -> list[Part]:
        """Returns the parts that were buffered, now that no more text will come."""


@dataclass(slots=True)
class ToolCall:
    """One call, as far as it has come."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """All parts of one choice so far, joined."""

    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        """All of the reasoning."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """All of the answer."""
        return "".join(self._content)

    def add(self, parts: list[Part]) -> None:
        """Adds parts that a parser made."""
        for part in parts:
            if isinstance(part, Content):
                self._content.append(part.text)
            elif isinstance(part, Reasoning):
                self._reasoning.append(part.text)
            elif isinstance(part, ToolCallBegin):
                self.tool_calls.append(ToolCall(part.id, part.name))
            else:
                self.tool_calls[part.index].arguments += part.text


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] = {}
    """JSON schema of its arguments; empty for any object."""
    strict: bool = False
    """True if arguments must keep to the schema."""


ToolChoice = Literal["auto", "required", "named"]
"""Says if the model decides whether it calls a tool, must call one, or must call the only one there is."""


class OutputParsing(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that a request needs to have parsed from its output."""

    tools: tuple[Tool, ...] = ()
    """Tools that may be called; if empty, calls are not looked for, and what looks like one is part of the answer."""
    tool_choice: ToolChoice = "auto"
    has_forbidden_tools: bool = False
    """True if the model is shown tools that it may not call."""
    parallel_tool_calls: bool = True
    """True if more than one call may be made."""
    thinking_token_budget: int | None = None
    """Tokens of reasoning after which it is ended; None for no limit."""
    continued_text: str = ""
    """The beginning of the answer with which the prompt ends, if a message is to be continued."""
