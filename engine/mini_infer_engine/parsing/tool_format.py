"""How a family of models writes calls of tools: what a format must say of itself. Knows none of them."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import msgspec

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting


class ToolCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is written, as what a grammar needs to hold an output to it: texts around a name and its arguments.

    An output with calls is `calls_begin`, calls with `separator` between them, `calls_end`; a call is `before_name`,
    the name, `after_name`, the arguments that the function's schema validates, `after_arguments`.
    """

    before_name: str = ""
    after_name: str
    after_arguments: str = ""
    separator: str = ""
    calls_begin: str = ""
    calls_end: str = ""
    trigger: str = ""
    """Where this stands in free text, calls begin: the beginning of `calls_begin` and `before_name` together. Empty:
    what stands before a name is too common, and calls begin where the name of a tool that may be called follows it."""
    arguments: Literal["json", "xml", "python"] = "json"
    """JSON: an object; XML: <parameter=KEY>VALUE</parameter> for each; Python: KEY=VALUE with commas between."""


class CallOpening(NamedTuple):
    """Where a call certainly begins."""

    marker: str
    next_text: str
    """What stands behind the marker, white space aside."""


class ToolFormat(ABC):
    """One format. It has no state: what it reads is in the source, what it found in the sink."""

    markers: tuple[str, ...] = ()
    """Texts that the format cannot be read without; where they are special tokens, they are shown."""
    call_format: ToolCallFormat
    """For grammars."""
    ends_thinking: CallOpening | None = None
    """A call that begins so ends thinking that has not been ended; None: none does."""
    id_prefix, id_length = "call_", 24
    """Of a call's id: as OpenAI's are, unless the family's templates want others."""

    @abstractmethod
    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Tell calls and the answer around them, up to the text's end."""


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a family of models writes its thinking: between two markers, before its answer."""

    begin: str
    end: str
