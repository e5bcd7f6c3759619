"""Conversations that come back with calls whose arguments are no JSON, in each dialect: they go on."""

import json
from typing import Any

import pytest

from tests.engine.server.dry_server import DryServer
from tests.prompts.test_messages import BROKEN

TOOL = {"name": "look", "parameters": {"type": "object"}}
RAW = ['{"a": "x\ny"}', '{"a": "\t"}', "", "null", '{"a": NaN}', "\ud83d".encode("utf-8", "replace").decode()]


def chat(arguments: str) -> tuple[str, dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Nothing."},
    ]
    return "/v1/chat/completions", {"messages": messages}


def responses(arguments: str) -> tuple[str, dict[str, Any]]:
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": "Nothing."},
    ]
    return "/v1/responses", {"input": items}


def messages(value: Any) -> tuple[str, dict[str, Any]]:
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t_1", "name": "look", "input": value}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t_1", "content": "Nothing."}]},
    ]
    return "/v1/messages", {"model": "dry", "max_tokens": 5, "messages": turns}


def wrapped(arguments: str) -> tuple[str, dict[str, Any]]:
    return messages({"INVALID_JSON": arguments})


@pytest.mark.parametrize("dialect", [chat, responses, messages, wrapped])
@pytest.mark.parametrize("arguments", [*BROKEN, *RAW], ids=lambda text: json.dumps(text)[:14])
def test_a_conversation_goes_on_when_its_arguments_are_no_json(server: DryServer, dialect: Any, arguments: str) -> None:
    path, body = dialect(arguments)
    answer = server.client.post(path, json=body)
    # The longest ones are more than the context holds, which is another matter.
    if answer.status_code != 200:
        assert answer.json()["error"].get("code") == "context_length_exceeded" or "context" in answer.text
        assert len(arguments) > 3000


@pytest.mark.parametrize("arguments", [5, True, [], {"a": 1.5, "b": [None]}])
def test_tool_call_arguments_are_shown_or_refused_by_name_for_each_json_type(server: DryServer, arguments: Any) -> None:
    path, body = chat(arguments)
    answer = server.client.post(path, json=body)
    if isinstance(arguments, list | dict):
        assert answer.status_code == 200
    else:
        assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
