"""Converts tools of OpenAI's Responses API to those of chat.completions. Knows no model and no parser of calls.

Functions stand flat there, under `function` in a chat. A custom tool, whose input is any text, is shown to the model as
a function with one string, and a function of a namespace as NAMESPACE__NAME, as vLLM has it; tools that OpenAI runs
itself are not there, and refused by name.
"""

from typing import Any, NoReturn

from mini_infer_apis.dialects.response_items import CUSTOM_INPUT, namespaced
from mini_infer_web.api_errors import FieldPath, refuse_field

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def chat_tools(tools: object) -> list[dict[str, Any]]:
    """Returns a request's `tools`. Raises ApiError 400 if one is of a kind that is not supported, or malformed."""
    if not isinstance(tools, list):
        _refuse("tools", "must be a list of tools", "invalid_value")
    return [made for index, tool in enumerate(tools) for made in _tools(tool, ("tools", index))]


def tool_paths(tools: object) -> list[FieldPath]:
    """Returns the place of each of `chat_tools` among well-formed tools: those of a namespace are in it."""
    paths: list[FieldPath] = []
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        is_space = tool["type"] == "namespace"
        paths += [("tools", index, "tools", at) for at in range(len(tool["tools"]))] if is_space else [("tools", index)]
    return paths


def namespaced_names(tools: object) -> dict[str, tuple[str, str]]:
    """Maps the names by which the model sees functions of namespaces to their namespace and name; the tools are
    well-formed.
    """
    spaces = [tool for tool in tools if tool["type"] == "namespace"] if isinstance(tools, list) else []
    return {
        namespaced(space["name"], tool["name"]): (space["name"], tool["name"])
        for space in spaces
        for tool in space["tools"]
    }


def custom_names(tools: object) -> frozenset[str]:
    """Returns the names of the custom tools among well-formed ones."""
    return (
        frozenset(tool["name"] for tool in tools if tool["type"] == "custom")
        if isinstance(tools, list)
        else frozenset()
    )


def chat_tool_choice(choice: object) -> Any:
    """Returns a request's `tool_choice`. Raises ApiError 400 if it names a kind of tool that is not supported."""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind in ("function", "custom"):
        return _named(choice, ("tool_choice",))
    if isinstance(choice, dict) and kind == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list):
            _refuse(("tool_choice", "tools"), "must be a list of tools", "invalid_value")
        allowed = [_named(tool, ("tool_choice", "tools", index)) for index, tool in enumerate(tools)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    return _refuse(
        "tool_choice", "must be none, auto, required, or an object of type function, custom or allowed_tools"
    )


def _tools(tool: object, where: FieldPath) -> list[dict[str, Any]]:
    """Returns one tool, or those of a namespace."""
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        return [_tool(tool, where)]
    name, members = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        _refuse((*where, "name"), "must be a string", "invalid_value")
    if not isinstance(members, list) or not members:
        _refuse((*where, "tools"), "must be a list of functions", "invalid_value")
    made = []
    for index, member in enumerate(members):
        place = (*where, "tools", index)
        if not isinstance(member, dict) or member.get("type") != "function":
            _refuse((*place, "type"), "must be function: a namespace holds functions alone")
        function = _tool(member, place)
        function["function"]["name"] = namespaced(name, function["function"]["name"])
        made.append(function)
    return made


def _tool(tool: object, where: FieldPath) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(kind, str):
        _refuse(where, 'must be {"type": "function", "name": ...}', "invalid_value")
    if kind == "custom":
        return _custom(tool, where)
    if kind == "function":
        return _function({name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}, where)
    message = f"{kind[:100]!r} is not supported: this server has function and custom tools, and namespaces"
    return _refuse((*where, "type"), message)


def _function(function: dict[str, Any], where: FieldPath) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        _refuse((*where, "name"), "must be a string", "invalid_value")
    return {"type": "function", "function": function}


def _custom(tool: dict[str, Any], where: FieldPath) -> dict[str, Any]:
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        _refuse((*where, "format"), "is not supported: a custom tool takes any text here")
    text = {"type": "string", "description": "The input of the tool, as plain text."}
    parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    described = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return _function(described | {"parameters": parameters | {"additionalProperties": False}}, where)


def _named(choice: object, where: FieldPath) -> dict[str, Any]:
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom") or not isinstance(name, str):
        _refuse(where, 'must be {"type": "function", "name": ...}')
    return {"type": "function", "function": {"name": name}}


def _refuse(where: str | FieldPath, message: str, code: str = "unsupported_value") -> NoReturn:
    refuse_field(where, message, code=code)
