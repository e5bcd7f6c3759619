"""Many conversations in one request, and requests that say by their fields what they are."""

from typing import Any

import httpx
import pytest

from tests.engine.server.dry_server import DryServer

BATCH = "/v1/chat/completions/batch"


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def post(server: DryServer, path: str, **fields: Any) -> httpx.Response:
    return server.client.post(path, json={"model": "dry"} | fields)


def test_each_conversation_of_a_batch_has_its_choice(server: DryServer) -> None:
    contents = ["a", "bb", "é€😀"]
    answer = post(server, BATCH, messages=[chat("before", content) for content in contents], max_tokens=100).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [f"You said: {text}" for text in contents]
    alone = [
        post(server, "/v1/chat/completions", messages=chat("before", content)).json()["usage"] for content in contents
    ]
    for name in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][name] == sum(usage[name] for usage in alone)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": chat("a")}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [chat("a"), []]}, "messages[1]"),
        ({"messages": [chat("a"), [{"role": "alien", "content": "b"}]]}, "messages[1][0].role"),
        ({"messages": [chat("a"), [{"role": "user", "content": 5}]]}, "messages[1][0].content"),
        ({"messages": [chat("a"), chat("x" * 9000)]}, "messages[1]"),
        ({"messages": [chat("a")], "stream": True}, "stream"),
        ({"messages": [chat("a")], "n": 2}, "n"),
        ({"messages": [chat("a")], "echo": True}, "echo"),
        ({"messages": [chat("a")], "use_beam_search": True}, "use_beam_search"),
        ({"messages": [chat("a")], "temperature": 5}, "temperature"),
        ({"messages": [chat("a")] * 129}, "messages"),
    ],
)
def test_the_error_names_the_conversation_when_one_of_a_batch_is_refused(
    server: DryServer, fields: dict[str, Any], param: str
) -> None:
    response = post(server, BATCH, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json()["error"]["message"].startswith(param)


def test_invocations_are_served_as_chat_or_completion(server: DryServer) -> None:
    def comparable(answer: httpx.Response) -> dict[str, Any]:
        return {name: value for name, value in answer.json().items() if name in ("object", "model", "choices")}

    for path, fields in (("/v1/chat/completions", {"messages": chat("hi")}), ("/v1/completions", {"prompt": "hi"})):
        assert comparable(post(server, "/invocations", **fields)) == comparable(post(server, path, **fields))
    assert "data: [DONE]" in post(server, "/invocations", prompt="hi", stream=True).text
    for fields in ({}, {"messages": chat("hi"), "prompt": "hi"}):
        assert post(server, "/invocations", **fields).status_code == 400
