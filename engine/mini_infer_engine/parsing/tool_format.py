"""How a family of models writes calls of tools: what a format must say of itself. Knows none of them."""

from typing import Protocol

import msgspec

from mini_infer_engine.parsing.base import Tool
from mini_infer_engine.parsing.sink import Sink
from mini_infer_engine.parsing.text_source import TextSource, Waiting


class ToolFormat(Protocol):
    """One format. It has no state: what it reads is in the source, what it found in the sink."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the format cannot be read without; where they are special tokens, they are shown."""

    def read(self, source: TextSource, sink: Sink, tools: tuple[Tool, ...]) -> Waiting[None]:
        """Tell calls and the answer around them, up to the text's end."""


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a family of models writes its thinking: between two markers, before its answer."""

    begin: str
    end: str
