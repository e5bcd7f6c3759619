"""Checks `tools` and `tool_choice` of a chat, and derives what to parse from the output. Knows no model's format."""

from typing import Annotated, Any, Literal, NamedTuple, cast

from msgspec import Meta, Struct

from mini_infer_engine.api.dialects.openai.json_schema import fault_in_schema
from mini_infer_engine.parsing.base import OutputParsing, Tool, ToolChoice
from mini_infer_web.api_errors import FieldPath, refuse_field
from mini_infer_web.body_fields import quoted

_MAX_TOOLS = 512
_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Struct):
    """A function as the model is shown it. Other fields are ignored, as in messages."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct):
    """One of `tools`. Other fields, such as `cache_control`, are ignored, as in messages."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


Tools = Annotated[list[FunctionTool], Meta(min_length=1, max_length=_MAX_TOOLS)]


class Choice(NamedTuple):
    """A parsed `tool_choice`."""

    mode: ToolChoice | Literal["none"]
    names: dict[FieldPath, str]
    """Names of the functions that may be called, by the place where each is named; if empty, all may be."""


def tool_parsing(tools: list[FunctionTool] | None, tool_choice: object, parallel: bool | None) -> OutputParsing:
    """Returns the parts to parse from an output of a model with these tools. Raises ApiError if they do not go
    together.
    """
    choice = _choice(tool_choice)
    if not tools:
        if choice.mode != "none" and tool_choice is not None:
            refuse_field("tool_choice", "is only allowed where tools are given")
        return OutputParsing()
    _check_tools(tools)
    by_name = {tool.function.name: _tool(tool.function) for tool in tools}
    for where, name in choice.names.items():
        if name not in by_name:
            refuse_field(where, f"is {quoted(name)}, and no tool has that name")
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
        where = ("tool_choice", "function", "name")
        return Choice("named", {where: _name(value["function"], where)})
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and value.keys() == {"type", "allowed_tools"}:
        return _allowed(value["allowed_tools"])
    return refuse_field("tool_choice", f"must be {_CHOICES}", code="invalid_value")


def _allowed(value: object) -> Choice:
    where = ("tool_choice", "allowed_tools")
    if not isinstance(value, dict) or value.keys() != {"mode", "tools"} or value["mode"] not in ("auto", "required"):
        refuse_field(where, 'must be {"mode": "auto" or "required", "tools": [...]}')
    if not isinstance(value["tools"], list) or not value["tools"]:
        refuse_field((*where, "tools"), "must be a list with at least one tool")
    names: dict[FieldPath, str] = {}
    for index, tool in enumerate(value["tools"]):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            refuse_field((*where, "tools", index), "must be a function")
        place = (*where, "tools", index, "function", "name")
        names[place] = _name(tool.get("function"), place)
    return Choice(value["mode"], names)


def _name(function: object, where: FieldPath) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        refuse_field(where, "must be the name of a tool")
    return name


def _check_tools(tools: list[FunctionTool]) -> None:
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        function, where = tool.function, ("tools", index, "function")
        first = seen.setdefault(function.name, index)
        if first != index:
            refuse_field(
                (*where, "name"), f"is {function.name!r}, which is ", ("tools", first), "'s: names must differ"
            )
        parameters = (*where, "parameters")
        if function.parameters and (fault := fault_in_schema(function.parameters)):
            refuse_field((*parameters, *fault[0]), fault[1], code="invalid_function_parameters")
        if function.parameters and function.parameters.get("type", "object") != "object":
            problem = f'has the type {quoted(function.parameters["type"])}; arguments are an "object"'
            refuse_field(parameters, problem, code="invalid_function_parameters")
