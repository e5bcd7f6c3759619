"""Which formats there are, by vLLM's names for their parsers, and which of them a model's chat template shows."""

from collections.abc import Iterable

import msgspec

from mini_infer_engine.parsing.hermes import HermesFormat
from mini_infer_engine.parsing.tool_format import ReasoningFormat, ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
}
_THINK_TAGS = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = {
    "qwen3": _THINK_TAGS,
    "deepseek_r1": _THINK_TAGS,
}
AUTO, NONE = "auto", "none"


class OutputFormats(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes what is not plain answer."""

    tool_call_parser: str | None = None
    """Name of the format of calls; None: none is known."""
    reasoning_parser: str | None = None

    @property
    def tools(self) -> ToolFormat | None:
        """The format of calls."""
        return None if self.tool_call_parser is None else TOOL_FORMATS[self.tool_call_parser]

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of thinking."""
        return None if self.reasoning_parser is None else REASONING_FORMATS[self.reasoning_parser]


def output_formats(
    templates: Iterable[str], tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> OutputFormats:
    """Those that are asked for by name, or that the sources of a model's chat templates show. ValueError: no such."""
    source = "\n".join(templates)
    return OutputFormats(
        tool_call_parser=_chosen("tool_call_parser", tool_call_parser, TOOL_FORMATS, _shown_calls(source)),
        reasoning_parser=_chosen("reasoning_parser", reasoning_parser, REASONING_FORMATS, _shown_reasoning(source)),
    )


def _chosen(option: str, asked: str, known: Iterable[str], shown: str | None) -> str | None:
    if asked == AUTO:
        return shown
    if asked == NONE:
        return None
    if asked not in known:
        raise ValueError(f"{option} is {asked!r}; write {AUTO}, {NONE}, {', '.join(known)}")
    return asked


def _shown_calls(template: str) -> str | None:
    return "hermes" if "<tool_call>" in template else None


def _shown_reasoning(template: str) -> str | None:
    return "qwen3" if "<think>" in template else None
