"""Converts tools of OpenAI's Responses API to those of chat.completions. Knows no model and no parser of calls.

Functions stand flat there, under `function` in a chat. A custom tool, whose input is any text, is shown to the model as
a function with one string, and a function of a namespace as NAMESPACE__NAME, as vLLM has it; tools that OpenAI runs
itself are not there, and refused by name.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from mini_infer_apis.dialects.response_items import CUSTOM_INPUT, namespaced
from mini_infer_apis.dialects.responses_request import (
    AllowedTools,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    NamespaceTool,
    Tool,
)
from mini_infer_web.api_errors import FieldPath


def chat_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Returns a request's `tools` as a chat's."""
    return [made for tool in tools for made in _tools(tool)]


def tool_paths(tools: Sequence[Tool]) -> list[FieldPath]:
    """Returns the place of each of `chat_tools` in the request: those of a namespace are in it."""
    paths: list[FieldPath] = []
    for index, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            paths += [("tools", index, "tools", at) for at in range(len(tool.tools))]
        else:
            paths.append(("tools", index))
    return paths


def namespaced_names(tools: Iterable[Tool]) -> dict[str, tuple[str, str]]:
    """Maps the names by which the model sees functions of namespaces to their namespace and name."""
    return {
        namespaced(space.name, tool.name): (space.name, tool.name)
        for space in tools
        if isinstance(space, NamespaceTool)
        for tool in space.tools
    }


def custom_names(tools: Iterable[Tool]) -> frozenset[str]:
    """Returns the names of the custom tools."""
    return frozenset(tool.name for tool in tools if isinstance(tool, CustomTool))


def chat_tool_choice(choice: str | FunctionChoice | CustomChoice | AllowedTools) -> Any:
    """Returns a request's `tool_choice` as a chat's."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, AllowedTools):
        allowed = [_named(tool.name) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
    return _named(choice.name)


def _tools(tool: Tool) -> list[dict[str, Any]]:
    """Returns one tool, or those of a namespace."""
    if isinstance(tool, NamespaceTool):
        return [_function(member, namespaced(tool.name, member.name)) for member in tool.tools]
    return [_custom(tool) if isinstance(tool, CustomTool) else _function(tool, tool.name)]


def _function(tool: FunctionTool, name: str) -> dict[str, Any]:
    fields = {"name": name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _custom(tool: CustomTool) -> dict[str, Any]:
    text = {"type": "string", "description": "The input of the tool, as plain text."}
    parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    return _function(FunctionTool(tool.name, tool.description, parameters | {"additionalProperties": False}), tool.name)


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
