import json
from typing import Any

import pytest

from mini_infer_apis.dialects.anthropic import COUNT_TOKENS_PATH, chat_body, own_path
from mini_infer_apis.dialects.anthropic_errors import ANTHROPIC_ERRORS, ID_HEADER, error_body, errors_of
from mini_infer_apis.dialects.anthropic_request import MessagesRequest, parse_request
from mini_infer_web.api_errors import ApiError, FieldPath, field_name

TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": {"properties": {"city": {}}}}
USER = {"role": "user", "content": "hi"}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": list(messages or (USER,)), **fields}


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    converted = chat_body(body(*messages, **fields))["messages"]
    assert isinstance(converted, list)
    return converted


def refusal(request: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        chat_body(request)
    assert caught.value.status == 400
    return caught.value.message


def test_the_smallest_anthropic_request_becomes_a_chat() -> None:
    assert chat_body(body()) == {"model": "m", "messages": [USER], "max_completion_tokens": 100}


def test_anthropic_sampling_fields_become_those_of_chat_completions() -> None:
    requested = chat_body(
        body(
            temperature=0.5,
            top_p=0.9,
            top_k=4,
            stop_sequences=["END"],
            stream=True,
            metadata={"user_id": "u"},
            service_tier="standard_only",
            cache_control={"type": "ephemeral"},
            priority=3,
        )
    )
    assert requested == {
        "model": "m",
        "messages": [USER],
        "max_completion_tokens": 100,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["END"],
        "stream": True,
        "user": "u",
        "service_tier": "default",
        "priority": 3,
    }


def test_null_fields_are_ignored() -> None:
    nothing = dict.fromkeys(("system", "tools", "tool_choice", "thinking", "stop_sequences", "container", "speed"))
    assert chat_body(body(**nothing)) == chat_body(body())


def test_system_blocks_become_text_without_metadata() -> None:
    cached = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0123;"}
    assert messages_of(system="Be kind.") == [{"role": "system", "content": "Be kind."}, USER]
    assert messages_of(system=[billing, cached]) == [{"role": "system", "content": "Be kind."}, USER]
    assert messages_of(system=[billing]) == [USER]
    two = messages_of(system=[cached, {"type": "text", "text": "Be brief."}])
    assert two[0]["content"] == [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]


def test_a_system_message_becomes_a_developer_message_when_it_stands_between_others() -> None:
    assert messages_of(USER, {"role": "system", "content": "Now in French."})[1] == {
        "role": "developer",
        "content": "Now in French.",
    }


def test_tool_use_and_tool_result_blocks_become_messages() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "20 °C"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True}
    other = call | {"id": "toolu_2", "input": {}}
    assistant = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call, other]}
    converted = messages_of(
        USER, assistant, {"role": "user", "content": [result, failed, {"type": "text", "text": "And now?"}]}
    )
    arguments = [call["function"].pop("arguments") for call in converted[1]["tool_calls"]]
    assert [json.loads(value) for value in arguments] == [{"city": "Zürich"}, {}]
    assert converted[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": call_id, "type": "function", "function": {"name": "get_weather"}}
                for call_id in ("toolu_1", "toolu_2")
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "20 °C"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such city"},
        {"role": "user", "content": "And now?"},
    ]


def test_an_assistant_message_has_no_content_when_it_only_calls_a_tool() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    converted = messages_of(USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
    assert [message["content"] for message in converted] == ["hi", None, ""]


def test_thinking_blocks_become_reasoning_and_redacted_ones_are_dropped() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "abc"}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    text = {"type": "text", "text": "Yes."}
    converted = messages_of(USER, {"role": "assistant", "content": [thinking, redacted, text]}, USER)
    assert converted[1] == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}


def test_consecutive_messages_of_one_role_are_merged() -> None:
    assert messages_of(USER, {"role": "user", "content": "there"}) == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]}
    ]


def test_a_final_assistant_message_is_continued() -> None:
    requested = chat_body(body(USER, {"role": "assistant", "content": "The answer is ("}))
    assert requested["messages"][-1] == {"role": "assistant", "content": "The answer is ("}
    assert (requested["add_generation_prompt"], requested["continue_final_message"]) == (False, True)
    assert chat_body(body(USER, {"role": "assistant", "content": ""})) == chat_body(body())


def test_anthropic_tools_and_tool_choice_become_openais() -> None:
    function = {"name": "get_weather", "description": "The weather."}
    function["parameters"] = {"type": "object", "properties": {"city": {}}}  # type: ignore[assignment]
    assert chat_body(body(tools=[TOOL]))["tools"] == [{"type": "function", "function": function}]
    for choice, expected in (
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        (
            {"type": "tool", "name": "get_weather"},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ):
        requested = chat_body(body(tools=[TOOL], tool_choice=choice))
        assert {
            name: requested[name] for name in ("tool_choice", "parallel_tool_calls") if name in requested
        } == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 64}},
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 64},
        ),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
    ],
)
def test_thinking_and_output_config_become_chat_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat_body(body(**fields)) == chat_body(body()) | expected


def test_one_token_is_generated_when_max_tokens_is_zero() -> None:
    assert chat_body(body(max_tokens=0))["max_completion_tokens"] == 1


def test_count_tokens_needs_no_generation_fields() -> None:
    counted = {"model": "m", "messages": [USER], "system": "Be kind.", "tools": [TOOL]}
    assert chat_body(counted, COUNT_TOKENS_PATH) == {
        name: value for name, value in chat_body(body(**counted)).items() if name != "max_completion_tokens"
    }
    with pytest.raises(ApiError, match="max_tokens"):
        chat_body(counted | {"max_tokens": 5}, COUNT_TOKENS_PATH)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return body({"role": "user", "content": list(blocks)})


@pytest.mark.parametrize(
    ("request_body", "words"),
    [
        ({"messages": 5, "extra": 1}, ["extra is", "model is missing", "messages is 5", "max_tokens is missing"]),
        (body(temperature=1.5), ["temperature", "<= 1.0"]),
        (body(max_tokens=-1), ["max_tokens"]),
        (body(max_tokens=1.5), ["max_tokens", "int"]),
        (body(messages=[]), ["messages"]),
        (body(speed="fast"), ["speed", "fast"]),
        (body(container="c"), ["container", "leave it out"]),
        (body(mcp_servers=[{}]), ["mcp_servers"]),
        (body(tools=[TOOL | {"name": "a b"}]), ["tools[0].name"]),
        (body(tools=[{"type": "web_search_20250305", "name": "web_search"}]), ["tools[0]"]),
        (body(tools=[TOOL | {"defer_loading": True}]), ["tools[0].defer_loading"]),
        (body(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}), ["tool_choice.name", "'f'"]),
        (body(tools=[TOOL], tool_choice={"type": "auto", "name": "f"}), ["tool_choice.name"]),
        (body(tool_choice={"type": "any"}), ["tool_choice needs tools"]),
        (body(thinking={"type": "enabled"}), ["thinking.budget_tokens is missing"]),
        (body(thinking={"type": "enabled", "budget_tokens": 100}), ["thinking.budget_tokens is 100", "max_tokens"]),
        (body(thinking={"type": "between_tools"}), ["thinking.type"]),
        (user({"type": "document", "source": {}}), ["messages[0].content[0].type is 'document'", "text"]),
        (user({"type": "image", "source": {}}), ["messages[0].content[0].source"]),
        (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), ["content[0].source.type", "base64"]),
        (user({"type": "image", "source": {"type": "url", "url": ""}}), ["messages[0].content[0].source.url"]),
        (user({"type": "document", "source": {}}), ["messages[0].content[0].type is 'document'"]),
        (user({"type": "tool_use", "id": "t", "name": "f", "input": {}}), ["messages[0].content[0].type", "user"]),
        (user(), ["messages[0].content is empty"]),
        (user({"type": "tool_result", "tool_use_id": "toolu_9"}), ["messages[0].content[0].tool_use_id is 'toolu_9'"]),
        (user(*[{"type": "text", "text": ""}] * 20_000), ["messages have 20001 messages and blocks", "20000"]),
        (body(USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}),
         ["messages[1] calls a tool"]),
        (body({"role": "assistant", "content": ""}), ["messages hold no text"]),
        (body({"role": "robot", "content": "x"}), ["messages[0].role"]),
    ],
)  # fmt: skip
def test_a_messages_request_is_refused_by_name(request_body: dict[str, Any], words: list[str]) -> None:
    message = refusal(request_body)
    for word in words:
        assert word in message


def test_a_long_value_is_truncated_in_the_error() -> None:
    assert len(refusal(body(speed="x" * 100_000))) < 400


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str) -> None:
    answered = error_body(ApiError(status, "why", param="x", code="y"), "r-1")
    # A gateway tells by the code of an engine's error whether another engine may go on.
    code = {"code": "y"} if status >= 500 else {}
    assert answered == {"type": "error", "error": {"type": kind, "message": "why"} | code, "request_id": "r-1"}


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("stop",), "stop_sequences"),
        (("stop", 0), "stop_sequences[0]"),
        (("max_completion_tokens",), "max_tokens"),
        (("response_format",), "output_config.format"),
        (("response_format", "json_schema", "schema"), "output_config.format.schema"),
        (("tools", 2, "function", "name"), "tools[2].name"),
        (("tools", 0, "function", "parameters", "type"), "tools[0].input_schema.type"),
        (("tool_choice", "function", "name"), "tool_choice.name"),
        (("messages", 3, "content"), "messages"),
        (("model",), "model"),
    ],
)
def test_error_paths_have_the_clients_field_names(path: FieldPath, named: str) -> None:
    assert field_name(own_path(path)) == named


@pytest.mark.parametrize("extra", [{"cache_control": {"type": "ephemeral", "scope": "x"}}, {"color": "red"}])
def test_extra_keys_of_messages_blocks_and_tools_are_ignored(extra: dict[str, Any]) -> None:
    block = {"type": "text", "text": "x"} | extra
    sent = body({"role": "user", "content": [block]} | extra, tools=[TOOL | extra])
    assert chat_body(sent) == chat_body(body({"role": "user", "content": "x"}, tools=[TOOL]))


def test_a_thread_id_is_refused_with_a_remedy() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "thread": None}
    parse_request(body, MessagesRequest)
    with pytest.raises(ApiError) as raised:
        parse_request(body | {"thread": {"type": "create"}}, MessagesRequest)
    answered = error_body(raised.value, "")["error"]
    assert answered["details"]["error_code"] == "thread_unsupported_request", "anthropic's clients look for it"
    assert "thread is not supported" in answered["message"]


def test_context_management_is_accepted_only_when_it_keeps_everything() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    keep = {"type": "clear_thinking_20251015", "keep": "all"}
    parse_request(body | {"context_management": {"edits": [keep]}}, MessagesRequest)
    for edit in (keep | {"keep": {"type": "thinking_turns", "value": 1}}, {"type": "clear_tool_uses_20250919"}):
        with pytest.raises(ApiError, match="context_management"):
            parse_request(body | {"context_management": {"edits": [edit]}}, MessagesRequest)


def test_a_stream_error_is_an_anthropic_event() -> None:
    event = ANTHROPIC_ERRORS.event(ApiError(500, "why"), "r-1")
    assert event.startswith(b'event: error\ndata: {"type":"error","error":{')
    assert event.endswith(b"}\n\n")


def test_each_path_has_the_error_shape_of_its_api() -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        assert errors_of(path).id_header == ID_HEADER
    for path in ("/v1/chat/completions", "/v1/messages2", "/v1/models"):
        assert errors_of(path).body(ApiError(400, "why"), "r-1") == ApiError(400, "why").body()
