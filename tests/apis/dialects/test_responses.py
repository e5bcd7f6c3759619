"""Bodies of /v1/responses as chats, as tables."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_apis.dialects.response_items import sealed_reasoning
from mini_infer_apis.dialects.response_tools import namespaced_names
from mini_infer_apis.dialects.responses import chat_body
from mini_infer_apis.dialects.responses_request import parse_conversation
from mini_infer_web.api_errors import ApiError

CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}', "id": "fc_1"}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
USER = {"role": "user", "content": "hi"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "seen"}


def assistant(text: str, **more: object) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def thought(text: str, **more: object) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", [{"role": "user", "content": parts("hi")}]),
        ([USER], [USER]),
        ([{"role": "developer", "content": "be brief"}, USER], [{"role": "developer", "content": "be brief"}, USER]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            [{"role": "user", "content": parts("hi")}],
        ),
        ([USER, assistant("yes"), USER], [USER, {"role": "assistant", "content": parts("yes")}, USER]),
        (
            [USER, CALL, OUTPUT],
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
            ],
        ),
        (
            [USER, thought("hm"), assistant("so"), CALL, CALL | {"call_id": "call_2"}, OUTPUT],
            [
                USER,
                {
                    "role": "assistant",
                    "content": parts("so"),
                    "reasoning": "hm",
                    "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_2"}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
            ],
        ),
        (
            [USER, assistant("one"), assistant("two")],
            [USER, {"role": "assistant", "content": parts("one")}, {"role": "assistant", "content": parts("two")}],
        ),
        (
            [thought("", content=[], encrypted_content=sealed_reasoning("so é")), assistant("x")],
            [{"role": "assistant", "content": parts("x"), "reasoning": "so é"}],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}, assistant("x")],
            [{"role": "assistant", "content": parts("x"), "reasoning": "short"}],
        ),
        (
            [{"type": "custom_tool_call", "call_id": "c", "name": "run", "input": 'a "b"'}],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "run", "arguments": json.dumps({"input": 'a "b"'})},
                        }
                    ],
                }
            ],
        ),
    ],
)
def test_input_items_become_messages(given: object, messages: list[dict[str, Any]]) -> None:
    assert chat_body({"input": given})["messages"] == messages


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"instructions": "be brief"}, {}),
        ({"max_output_tokens": 5, "temperature": 0.5, "top_p": None}, {"max_completion_tokens": 5, "temperature": 0.5}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True, "description": None}
                }
            },
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}},
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True, "description": None}]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]},
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
                }
            },
        ),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"cache_salt": "s", "top_k": 3}, {"cache_salt": "s"}),
        ({"store": True, "background": True, "previous_response_id": "resp_1", "tools": []}, {}),
    ],
)
def test_response_fields_become_chat_fields(body: dict[str, Any], chat: dict[str, Any]) -> None:
    made = chat_body({"input": "hi"} | body)
    messages = made.pop("messages")
    assert made == chat
    assert messages[0] == ({"role": "system", "content": "be brief"} if "instructions" in body else messages[-1])


NAMESPACE = {
    "type": "namespace",
    "name": "mcp",
    "description": "d",
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}],
}


def test_namespaced_functions_get_a_prefix() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "mcp", "name": "look", "arguments": "{}"}
    chat = chat_body({"input": [call], "tools": [NAMESPACE, {"type": "function", "name": "look"}]})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["mcp__look", "look"]
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "mcp__look"
    tools = parse_conversation({"input": "x", "tools": [NAMESPACE]}).tools
    assert namespaced_names(tools or ()) == {"mcp__look": ("mcp", "look")}
    for wrong, where in (
        (NAMESPACE | {"tools": []}, "tools[0].tools"),
        (NAMESPACE | {"tools": [{"type": "custom", "name": "x"}]}, "tools[0].tools[0].type"),
        (NAMESPACE | {"name": 5}, "tools[0].name"),
    ):
        with pytest.raises(ApiError) as raised:
            chat_body({"input": "x", "tools": [wrong]})
        assert raised.value.param == where


def test_a_custom_tool_becomes_a_function_with_one_string() -> None:
    function = chat_body({"input": "x", "tools": [{"type": "custom", "name": "run", "description": "d"}]})["tools"][0]
    assert function["function"]["name"] == "run"
    assert function["function"]["parameters"]["required"] == ["input"]


def test_an_incomplete_assistant_item_is_continued() -> None:
    chat = chat_body({"input": [USER, assistant("I am", status="incomplete")]})
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat_body({"input": [USER, assistant("I am", status="incomplete"), USER]})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "alien", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [USER, {"type": "web_search_call", "id": "ws"}]}, "input[1].type"),
        ({"input": [USER, OUTPUT]}, "input[1].call_id"),
        ({"input": [CALL | {"name": None}]}, "input[0].name"),
        ({"input": [thought("", encrypted_content="gAAA", content=None)]}, "input[0].encrypted_content"),
        ({"input": "x", "instructions": []}, "instructions"),
        ({"input": "x", "tools": {}}, "tools"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": "x", "reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"input": "x", "reasoning": {"colour": 1}}, "reasoning.colour"),
        ({"input": "x", "text": {"format": "json"}}, "text.format"),
        ({"input": "x", "text": {"style": "x"}}, "text.style"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_the_error_names_the_clients_field_when_a_response_is_invalid(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_body(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_field"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
        ({"input": "x", "tools": [{"type": "custom"}]}, "tools[0].name", "missing_field"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice", "unsupported_value"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools", "tools": [{}]}}, "tool_choice.tools[0].type", None),
        ({"input": "x", "reasoning": {"summary": "concise"}}, "reasoning.summary", "unsupported_value"),
        ({"input": "x", "reasoning": {"effort": 5}}, "reasoning.effort", "invalid_value"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", None),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ],
)
def test_error_has_path_and_code_when_a_value_is_wrong(body: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        chat_body(body)
    assert caught.value.param == param
    assert code is None or caught.value.code == code


def test_all_wrong_fields_are_named_when_several_are() -> None:
    with pytest.raises(ApiError) as caught:
        chat_body({"input": 5, "tools": [{}], "reasoning": {"effort": 1}, "text": {"style": 1}})
    for name in ("input", "tools[0].type", "reasoning.effort", "text.style"):
        assert name in caught.value.message


_SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
_NAMES = st.sampled_from(
    ["type", "role", "content", "text", "name", "tools", "output", "call_id", "input", "summary", "format", "status"]
)
_WORDS = st.sampled_from(["message", "function", "custom", "namespace", "reasoning", "user", "input_text"])
_FIELDS = ("input", "tools", "tool_choice", "reasoning", "text", "include", "metadata")
_VALUES = st.recursive(
    _SCALARS | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(_FIELDS, _VALUES)))
@settings(max_examples=300)
def test_chat_or_api_error_comes_when_any_json_is_sent(body: dict[str, Any]) -> None:
    try:
        chat = chat_body(body)
    except ApiError as error:
        status, param = error.status, error.param
    else:
        assert chat["messages"]
        return
    assert (status, bool(param)) == (400, True)
