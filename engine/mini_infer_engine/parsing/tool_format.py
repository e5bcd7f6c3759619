"""The interface of a format in which a family of models writes tool calls. Knows none of them."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import msgspec

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting


class TaggedArguments(msgspec.Struct, frozen=True):
    """Arguments in tags, one after the other: `before_key`, the key, `after_key`, the value, `after_value`.

    Texts have no quotes; other values are JSON.
    """

    before_key: str
    after_key: str
    after_value: str


class QuotedArguments(msgspec.Struct, frozen=True):
    """KEY:VALUE with commas between, of which keys are bare and strings stand between two of `quote`, without escapes.
    Objects and lists have the same form within brackets.
    """

    quote: str


ArgumentStyle = Literal["json", "python"] | TaggedArguments | QuotedArguments
"""Form of the arguments. JSON: an object; Python: KEY=VALUE with commas between."""


class ToolCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The texts around a call's name and its arguments, from which a grammar can constrain an output.

    An output with calls is `calls_begin`, calls with `separator` between them, `calls_end`; a call is `before_name`,
    the name, `after_name`, the arguments that the function's schema validates, `after_arguments`.
    """

    before_name: str = ""
    has_number: bool = False
    """True if a colon and the call's number stand between the name and `after_name`."""
    after_name: str
    after_arguments: str = ""
    separator: str = ""
    calls_begin: str = ""
    calls_end: str = ""
    trigger: str = ""
    """Text that begins calls in free text: the beginning of `calls_begin` and `before_name` together. If empty, the
    text before a name is too common, and calls begin where the name of a tool that may be called follows it.
    """
    arguments: ArgumentStyle = "json"


class CallOpening(NamedTuple):
    """A place where a call certainly begins: a marker and the text behind it."""

    marker: str
    next_text: str
    """Text behind the marker, white space aside."""


class ToolFormat(ABC):
    """One format. It has no state: it reads from the source, and emits to the sink."""

    markers: tuple[str, ...] = ()
    """Texts that the format cannot be parsed without; if they are special tokens, they are shown."""
    call_format: ToolCallFormat
    """Texts around a call, for grammars."""
    ends_thinking: CallOpening | None = None
    """Beginning of a call that ends reasoning which has not been ended; None if none does."""
    id_prefix, id_length = "call_", 24
    """Prefix and length of a call's id: as OpenAI's are, unless the family's templates expect others."""

    @abstractmethod
    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Emits calls and the answer around them, up to the text's end."""


class ReasoningFormat(msgspec.Struct, frozen=True):
    """The two markers between which a family of models writes its reasoning, before its answer."""

    begin: str
    end: str
    label: str = ""
    """Text behind `begin` that is no part of the reasoning."""
