"""Maps vLLM's names of parsers to formats, and finds the formats that a model's chat template shows."""

from collections.abc import Iterable

import msgspec

from mini_infer_engine.parsing.deepseek import V3_FORM, V31_FORM, DeepSeekFormat
from mini_infer_engine.parsing.gemma import FUNCTION_GEMMA, GEMMA4
from mini_infer_engine.parsing.harmony import HARMONY_REASONING, HarmonyFormat
from mini_infer_engine.parsing.hermes import HermesFormat
from mini_infer_engine.parsing.json_list import JsonListFormat
from mini_infer_engine.parsing.kimi import KimiFormat
from mini_infer_engine.parsing.llama3 import Llama3Format
from mini_infer_engine.parsing.mistral import LIST_FORM, NAME_AND_MARKER_FORM, NAME_FORM, MistralFormat
from mini_infer_engine.parsing.pythonic import PythonicFormat
from mini_infer_engine.parsing.tagged import GLM45, GLM47, MINIMAX_M2, QWEN3_CODER, SEED_OSS
from mini_infer_engine.parsing.tool_format import ReasoningFormat, ToolFormat
from mini_infer_engine.parsing.xlam import XlamFormat

_PYTHONIC = PythonicFormat()
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "llama3_json": Llama3Format(),
    "llama4_pythonic": _PYTHONIC,
    "pythonic": _PYTHONIC,
    "granite": JsonListFormat("<|tool_call|>", "<tool_call>"),
    "phi4_mini_json": JsonListFormat("functools"),
    "mistral": MistralFormat(LIST_FORM),
    "mistral_v11": MistralFormat(NAME_FORM),
    "mistral_v13": MistralFormat(NAME_AND_MARKER_FORM),
    "deepseek_v3": DeepSeekFormat(V3_FORM),
    "deepseek_v31": DeepSeekFormat(V31_FORM),
    "openai": HarmonyFormat(),
    "glm45": GLM45,
    "glm47": GLM47,
    "kimi_k2": KimiFormat(),
    "minimax_m2": MINIMAX_M2,
    "seed_oss": SEED_OSS,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
    "xlam": XlamFormat(),
}
_THINK_TAGS = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = {
    "qwen3": _THINK_TAGS,
    "deepseek_r1": _THINK_TAGS,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "openai_gptoss": HARMONY_REASONING,
    "glm45": _THINK_TAGS,
    "kimi_k2": _THINK_TAGS,
    "minimax_m2": _THINK_TAGS,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought\n"),
}
AUTO, NONE = "auto", "none"


class ParserChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A server's options about its model's formats; see the options of these names."""

    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    enable_auto_tool_choice: bool = True


AS_SHOWN = ParserChoice()


class OutputFormats(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of a model's tool calls and reasoning."""

    tool_call_parser: str | None = None
    """Name of the format of calls; None if none is known."""
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = True
    """True if a request may leave it to the model whether it calls a tool."""

    @property
    def shown(self) -> tuple[str, str]:
        """Names of both formats, for messages."""
        return self.tool_call_parser or NONE, self.reasoning_parser or NONE

    @property
    def tools(self) -> ToolFormat | None:
        """The format of calls."""
        return None if self.tool_call_parser is None else TOOL_FORMATS[self.tool_call_parser]

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning."""
        return None if self.reasoning_parser is None else REASONING_FORMATS[self.reasoning_parser]

    @property
    def is_harmony(self) -> bool:
        """True if an output is a series of messages with channels."""
        return self.reasoning is HARMONY_REASONING or isinstance(self.tools, HarmonyFormat)


def output_formats(templates: Iterable[str], choice: ParserChoice = AS_SHOWN) -> OutputFormats:
    """Returns the formats that are chosen by name, or that the sources of a model's chat templates show. Raises
    ValueError for an unknown name.
    """
    source = "\n".join(templates)
    calls = _chosen("tool_call_parser", choice.tool_call_parser, TOOL_FORMATS, _shown_calls(source))
    reasoning = _chosen("reasoning_parser", choice.reasoning_parser, REASONING_FORMATS, _shown_reasoning(source))
    return OutputFormats(
        tool_call_parser=calls,
        reasoning_parser=reasoning,
        enable_auto_tool_choice=choice.enable_auto_tool_choice,
    )


def _chosen(option: str, requested: str, available: Iterable[str], shown: str | None) -> str | None:
    if requested == AUTO:
        return shown
    if requested == NONE:
        return None
    if requested not in available:
        raise ValueError(f"{option} is {requested!r}; write {AUTO}, {NONE}, {', '.join(available)}")
    return requested


_SHOWN_CALLS = (
    ("openai", (HARMONY_REASONING.begin, "<|call|>")),
    ("glm47", ("<|observation|>", "</arg_key><arg_value>")),
    ("glm45", ("<|observation|>", "<arg_key>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("functiongemma", ("<start_function_call>", "<escape>")),
    ("gemma4", ("<|tool_call>call:", '<|"|>')),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral_v13", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS] [",)),
    ("mistral", ("[TOOL_CALLS][",)),
    ("mistral_v11", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>", "JSON list")),
    ("phi4_mini_json", ("functools[",)),
    ("xlam", ("make calls in a single JSON array", '"arguments"')),
    ("hermes", ("<tool_call>", '"name"')),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("llama3_json", ("<|header_start|>", '"parameters"')),
)
"""Formats, and texts that the templates of their models have in common; the first whose texts are all
there is the one.
"""


def _shown_calls(template: str) -> str | None:
    template = template.replace('\\"', '"')  # within a template's strings
    return next((name for name, markers in _SHOWN_CALLS if all(marker in template for marker in markers)), None)


_SHOWN_REASONING = (
    ("openai_gptoss", HARMONY_REASONING.begin),  # what ends it, ends every message, and those of other families
    ("qwen3", _THINK_TAGS.end),
    ("mistral", "[/THINK]"),
    ("seed_oss", "</seed:think>"),
    ("gemma4", "<channel|>"),
)
"""Formats of reasoning, and texts in templates by which they are known."""


def _shown_reasoning(template: str) -> str | None:
    return next((name for name, marker in _SHOWN_REASONING if marker in template), None)
