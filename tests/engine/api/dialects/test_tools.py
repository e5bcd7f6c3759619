from typing import Any

import pytest

from mini_infer_engine.api.dialects.openai.chat import ChatDialect
from mini_infer_engine.api.dialects.openai.json_schema import fault_in_schema
from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_prompts.messages import template_tools
from mini_infer_web.api_errors import ApiError

MESSAGES = [{"role": "user", "content": "x"}]
OBJECT = {"type": "object", "properties": {"city": {"type": ["string", "null"], "enum": ["Rome", None]}}}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def parsing(**fields: Any) -> OutputParsing:
    requested = ChatDialect().parse({"messages": MESSAGES} | fields).parsing
    assert requested is not None
    return requested


CHOICES: list[tuple[object, str, set[str]]] = [
    (None, "auto", {"f", "g"}),
    ("auto", "auto", {"f", "g"}),
    ("none", "auto", set()),
    ("required", "required", {"f", "g"}),
    (named("g"), "named", {"g"}),
    (allowed("auto", "g"), "auto", {"g"}),
    (allowed("required", "g", "f"), "required", {"f", "g"}),
]


@pytest.mark.parametrize(("choice", "mode", "names"), CHOICES)
def test_tool_choice_selects_allowed_and_required_tools(choice: object, mode: str, names: set[str]) -> None:
    requested = parsing(tools=[tool("f", parameters=OBJECT, strict=True), tool("g")], tool_choice=choice)
    assert (requested.tool_choice, {tool.name for tool in requested.tools}) == (mode, names)


def test_output_is_not_parsed_for_calls_when_there_are_no_tools() -> None:
    assert parsing() == parsing(tools=None, tool_choice="none") == OutputParsing()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": [tool("a b!")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(""), tool()]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(parameters=5)]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"properties": {"a": 1}})]}, "tools[0].function.parameters.properties.a"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice.function.name"),
    ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [tool()], "tool_choice": allowed("none", "f")}, "tool_choice.allowed_tools"),
    ({"tools": [tool()], "tool_choice": allowed("auto", "g")}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": {}}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_tools_and_messages_are_refused_by_name_when_openai_refuses_them(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsing(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rsplit(".", 1)[-1] in caught.value.message


@pytest.mark.parametrize("extra", [{"cache_control": {"type": "ephemeral"}}, {"color": "red"}, {"color": None}])
def test_extra_keys_of_messages_parts_and_tools_are_ignored(extra: dict[str, Any]) -> None:
    part = {"type": "text", "text": "x"} | extra
    body = {"messages": [{"role": "user", "content": [part]} | extra], "tools": [tool(**extra) | extra]}
    assert ChatDialect().parse(body).parsing == parsing(tools=[tool()])
    assert template_tools(body["tools"]) == [tool()], "the model does not see them"


def test_the_first_fault_of_a_tool_schema_is_named() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"not": deep}
    for schema, where in (
        (OBJECT | {"$defs": {"x": {"items": True}}, "required": ["city"], "additionalProperties": False}, None),
        ({"type": "strng"}, ("type",)),
        ({"type": [{}]}, ("type",)),
        ({"required": "city"}, ("required",)),
        ({"anyOf": [{}, {"enum": 5}]}, ("anyOf", 1, "enum")),
        ({"properties": []}, ("properties",)),
        ({"items": [{}, 5]}, ("items", 1)),
        (deep, ()),
    ):
        fault = fault_in_schema(schema)
        assert (fault and fault[0]) == where
