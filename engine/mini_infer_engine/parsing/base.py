"""What a model's output consists of: thinking, answer, calls of tools. The words between parsers and renderers.

Knows no model's format and no client's: parsers make these parts of text, renderers make answers of these parts.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of thinking."""

    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, gc=False):
    """A call begins; the calls of one output are numbered from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Reasoning | Content | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Reads the text of one choice as it comes. How the text is cut into pieces changes nothing but the parts' cut."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within thinking."""

    def push(self, text: str) -> list[Part]:
        """What has become certain with this piece."""

    def finish(self) -> list[Part]:
        """What was held back, now that no more text will come."""


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
        """All of the thinking."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """All of the answer."""
        return "".join(self._content)

    def add(self, parts: list[Part]) -> None:
        """Take what a parser made."""
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
    """JSON schema of its arguments; empty: any object."""
    strict: bool = False
    """Arguments must keep to the schema."""


ToolChoice = Literal["auto", "required", "named"]
"""Whether the model decides if it calls a tool, must call one, or must call the only one there is."""


class OutputParsing(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants to have read out of its output."""

    tools: tuple[Tool, ...] = ()
    """Empty: calls are not looked for, and what looks like one is part of the answer."""
    tool_choice: ToolChoice = "auto"
    has_forbidden_tools: bool = False
    """The model is shown tools that it may not call."""
    parallel_tool_calls: bool = True
    """More than one call may be made."""
    thinking_token_budget: int | None = None
    """Tokens of thinking after which it is ended; None: no limit."""
    continued_text: str = ""
    """The beginning of the answer that the prompt ends with, where a message is to be continued."""
