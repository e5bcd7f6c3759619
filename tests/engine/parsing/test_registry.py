from typing import get_args

import pytest

from mini_infer_contract.engine_options import ReasoningParser, ToolCallParser
from mini_infer_engine.parsing.registry import (
    AUTO,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputFormats,
    ParserChoice,
    output_formats,
)

TEMPLATES = {
    r'{{ "<tool_call>\n{\"name\": <function-name>" }}': "hermes",
    '{{ \'<tool_call>\\n{"name": "\' }}': "hermes",
    "{{ '<tool_call>\\n<function=' }}": "qwen3_coder",
    '"[TOOL_CALLS] [" + call': "mistral",
    '"[TOOL_CALLS]" + name + "[ARGS]"': "mistral_v13",
    '"[TOOL_CALLS]" + name + arguments': "mistral_v11",
    "'<｜tool▁calls▁begin｜>' type '\\n```json\\n'": "deepseek_v3",
    "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' name '<｜tool▁sep｜>'": "deepseek_v31",
    '<|start_header_id|> in the format {"name": function name, "parameters": dictionary': "llama3_json",
    "<|start_header_id|> in the format [func_name1(params_name1=params_value1, ...)]": "pythonic",
    "<|header_start|> Use exact format: [func_name1(param1=value1, param2=value2)]": "llama4_pythonic",
    "respond with <|tool_call|> followed by a JSON list of tools used": "granite",
    'formatted as functools[{"name": [function name], ...}]': "phi4_mini_json",
    "'<|start|>assistant<|channel|>analysis<|message|>' thinking '<|end|>' calls '<|call|>'": "openai",
    "'<|start_header_id|>' '<|channel|>analysis<|message|>'": None,
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value> ... '<|observation|>'": "glm45",
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value> ... '<|observation|>'": "glm47",
    "<|tool_calls_section_begin|> <|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}": "kimi_k2",
    "{%- set toolcall_begin_token = '<minimax:tool_call>' -%} <invoke name=\"tool-name-1\">": "minimax_m2",
    "{%- set toolcall_begin_token = '<seed:tool_call>' -%} \\n<function=example_function_name>": "seed_oss",
    "{{- '<start_function_call>call:' + function['name'] + '{' -}} {{ '<escape>' + argument + '<escape>' }}": (
        "functiongemma"
    ),
    "{{- '<|tool_call>call:' + function['name'] + '{' -}} {{- '<|\"|>' + argument + '<|\"|>' -}}": "gemma4",
    "<|start_header_id|> make calls in a single JSON array: "
    '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}] "parameters"': "xlam",
    "<tool_call>function_name\n<arg_key>key</arg_key>": None,
    "<|im_start|>{{ message.role }}": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_the_tool_call_parser_is_detected_from_the_template(template: str, name: str | None) -> None:
    assert output_formats([template]).tool_call_parser == name


def test_the_reasoning_parser_is_detected_from_the_template() -> None:
    assert output_formats(["content.split('</think>')"]).reasoning_parser == "qwen3"
    assert output_formats(["[THINK] ... [/THINK]"]).reasoning_parser == "mistral"
    assert output_formats(["<|channel|>analysis<|message|> ... <|end|>"]).reasoning_parser == "openai_gptoss"
    assert output_formats(["<|user|> ... <|end|>"]).reasoning_parser is None
    assert output_formats(["think_end_token = '</seed:think>'"]).reasoning_parser == "seed_oss"
    assert output_formats(["'<|channel>thought\\n<channel|>'"]).reasoning_parser == "gemma4"
    assert output_formats(["plain", "templates"]).reasoning_parser is None


def formats(templates: list[str], calls: str = AUTO, reasoning: str = AUTO) -> OutputFormats:
    return output_formats(templates, ParserChoice(tool_call_parser=calls, reasoning_parser=reasoning))


def test_parser_options_list_all_parsers() -> None:
    assert set(get_args(ToolCallParser)) == {AUTO, NONE, *TOOL_FORMATS}
    assert set(get_args(ReasoningParser)) == {AUTO, NONE, *REASONING_FORMATS}


def test_named_parsers_override_the_template() -> None:
    requested = formats(["<tool_call> </think>"], "mistral", "none")
    assert (requested.tool_call_parser, requested.reasoning_parser) == ("mistral", None)
    for name in TOOL_FORMATS:
        assert formats([], name).tools is TOOL_FORMATS[name]
    for name in REASONING_FORMATS:
        assert formats([], "none", name).reasoning == REASONING_FORMATS[name]
    with pytest.raises(ValueError, match=r"tool_call_parser is 'x'.*hermes"):
        formats([], "x")
