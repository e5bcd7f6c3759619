"""`tools` and `tool_choice` of a chat: what they may be, and what they ask of the output. Knows no model's format."""

from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field

from mini_infer_contract.api_errors import ApiError
from mini_infer_engine.api.dialects.fields import Body
from mini_infer_engine.api.dialects.json_schema import fault_in_schema
from mini_infer_engine.parsing.base import OutputParsing, Tool, ToolChoice

_MAX_TOOLS = 512
_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Body):
    """A function as the model is shown it."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """One of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


Tools = Annotated[list[FunctionTool], Field(min_length=1, max_length=_MAX_TOOLS)]


class Choice(NamedTuple):
    """A `tool_choice`, read."""

    mode: ToolChoice | Literal["none"]
    names: dict[str, str]
    """Where each function is named that may be called, and its name; empty: all may be."""


def tool_parsing(tools: list[FunctionTool] | None, tool_choice: object, parallel: bool | None) -> OutputParsing:
    """What is to be read out of an output where the model has these tools. ApiError: they do not go together."""
    choice = _choice(tool_choice)
    if not tools:
        if choice.mode != "none" and tool_choice is not None:
            raise ApiError(400, "tool_choice is only allowed where tools are given", param="tool_choice")
        return OutputParsing()
    _check_tools(tools)
    by_name = {tool.function.name: _tool(tool.function) for tool in tools}
    for where, name in choice.names.items():
        if name not in by_name:
            raise ApiError(400, f"{where} is {name!r}, and no tool has that name", param=where)
    if choice.mode == "none":
        return OutputParsing()
    allowed = choice.names.values() or by_name
    callable_tools = tuple(tool for name, tool in by_name.items() if name in allowed)
    return OutputParsing(
        tools=callable_tools,
        tool_choice=choice.mode,
        has_forbidden_tools=len(callable_tools) < len(tools),
        parallel_tool_calls=parallel is not False,
    )


def _tool(function: FunctionDefinition) -> Tool:
    return Tool(function.name, function.parameters or {}, function.strict is True)


def _choice(value: object) -> Choice:
    if value is None:
        return Choice("auto", {})
    if value in ("none", "auto", "required"):
        return Choice(cast("ToolChoice", value), {})
    if isinstance(value, dict) and value.get("type") == "function" and value.keys() == {"type", "function"}:
        where = "tool_choice.function.name"
        return Choice("named", {where: _name(value["function"], where)})
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and value.keys() == {"type", "allowed_tools"}:
        return _allowed(value["allowed_tools"])
    raise ApiError(400, f"tool_choice must be {_CHOICES}", param="tool_choice", code="invalid_value")


def _allowed(value: object) -> Choice:
    where = "tool_choice.allowed_tools"
    if not isinstance(value, dict) or value.keys() != {"mode", "tools"} or value["mode"] not in ("auto", "required"):
        raise ApiError(400, f'{where} must be {{"mode": "auto" or "required", "tools": [...]}}', param=where)
    if not isinstance(value["tools"], list) or not value["tools"]:
        raise ApiError(400, f"{where}.tools must be a list with at least one tool", param=f"{where}.tools")
    names = {}
    for index, tool in enumerate(value["tools"]):
        place = f"{where}.tools[{index}].function.name"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ApiError(400, f"{where}.tools[{index}] must be a function", param=f"{where}.tools[{index}]")
        names[place] = _name(tool.get("function"), place)
    return Choice(value["mode"], names)


def _name(function: object, where: str) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, f"{where} must be the name of a tool", param=where)
    return name


def _check_tools(tools: list[FunctionTool]) -> None:
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        function, where = tool.function, f"tools[{index}].function"
        first = seen.setdefault(function.name, index)
        if first != index:
            message = f"{where}.name is {function.name!r}, which is tools[{first}]'s: names must differ"
            raise ApiError(400, message, param=f"{where}.name")
        if function.parameters and (fault := fault_in_schema(function.parameters, f"{where}.parameters")):
            raise ApiError(400, f"{fault[0]} {fault[1]}", param=fault[0], code="invalid_function_parameters")
        if function.parameters and function.parameters.get("type", "object") != "object":
            message = f'{where}.parameters.type is {function.parameters["type"]!r}; arguments are an "object"'
            raise ApiError(400, message, param=f"{where}.parameters", code="invalid_function_parameters")
