import pytest

from mini_infer_engine.parsing.base import Content, OutputParsing, Tool
from mini_infer_engine.parsing.parser import FormatParser, check_parsing, markers
from mini_infer_engine.parsing.registry import OutputFormats
from mini_infer_web.api_errors import ApiError

TOOLS = (Tool("f"),)


def test_tools_are_refused_when_no_tool_call_parser_is_set() -> None:
    check_parsing(OutputFormats(), OutputParsing())
    with pytest.raises(ApiError, match="--tool-call-parser") as caught:
        check_parsing(OutputFormats(), OutputParsing(tools=TOOLS))
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_tool_calls_are_refused_when_automatic_choice_is_off() -> None:
    formats = OutputFormats(tool_call_parser="hermes", enable_auto_tool_choice=False)
    check_parsing(formats, OutputParsing(tools=TOOLS, tool_choice="required"))
    with pytest.raises(ApiError, match="enable-auto-tool-choice") as caught:
        check_parsing(formats, OutputParsing(tools=TOOLS))
    assert caught.value.param == "tool_choice"


def test_markers_are_those_of_the_active_parsers() -> None:
    formats = OutputFormats(tool_call_parser="mistral", reasoning_parser="mistral")
    assert markers(formats, OutputParsing()) == ("[THINK]", "[/THINK]")
    assert "[TOOL_CALLS]" in markers(formats, OutputParsing(tools=TOOLS))


def test_text_without_markers_is_emitted_at_once() -> None:
    formats = OutputFormats(tool_call_parser="hermes", reasoning_parser="qwen3")
    parser = FormatParser(formats, OutputParsing())
    assert [parser.push(piece) for piece in ("Hello ", "\n", "<tool_call>")] == [
        [Content("Hello ")],
        [Content("\n")],
        [Content("<tool_call>")],
    ]
    assert parser.finish() == []
