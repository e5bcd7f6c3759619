"""Structured output as a client of the dry-run server sees it."""

import json
from typing import Any

import httpx
import pytest

from tests.engine.server.dry_server import DryServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POINT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "sizes": {"type": "array", "minItems": 1}},
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}


def post(server: DryServer, path: str, **fields: Any) -> httpx.Response:
    prompt: Any = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    return server.client.post(path, json={"model": "dry", "max_tokens": 200} | prompt | fields)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice.get("text") or choice["message"]["content"] for choice in response.json()["choices"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_match_the_requested_structure(server: DryServer, path: str) -> None:
    [text] = texts(post(server, path, response_format=SCHEMA))
    assert set(json.loads(text)) == {"name", "kind", "sizes"}
    assert isinstance(json.loads(texts(post(server, path, response_format={"type": "json_object"}))[0]), dict)
    assert texts(post(server, path, structured_outputs={"choice": ["red", "blue"]}, n=2)) in (["blue"] * 2, ["red"] * 2)
    assert texts(post(server, path, structured_outputs={"regex": "[0-9]{3}"}))[0].isdigit()
    assert texts(post(server, path, structured_outputs={"grammar": 'root ::= "x" "y"+ "z"'}))[0].startswith("xy")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "said"}}
    assert texts(post(server, path, response_format=tag)) == ["said"]
    message_part = post(server, path, response_format=SCHEMA).json()
    assert (message_part["choices"][0]["finish_reason"], message_part["choices"][0]["stop_reason"]) == ("stop", None)


def test_a_structured_stream_equals_the_whole_answer(server: DryServer) -> None:
    [whole] = texts(post(server, CHAT, response_format=SCHEMA))
    events = post(server, CHAT, response_format=SCHEMA, stream=True).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == whole


@pytest.mark.parametrize(
    ("fields", "param", "message_part"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
         "response_format", "objekt"),
        ({"response_format": SCHEMA | {"json_schema": SCHEMA["json_schema"] | {"schema": {"not": {}}}}},
         "response_format", '"not"'),
        ({"response_format": {"type": "structural_tag", "format": {"type": "odd"}}}, "response_format", "'odd'"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: @x"}}, "structured_outputs", "x"),
        ({"structured_outputs": {"regex": "a+", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ],
)  # fmt: skip
def test_a_schema_is_refused_by_name_when_it_cannot_be_enforced(
    server: DryServer, fields: Any, param: str, message_part: str
) -> None:
    for path in (CHAT, COMPLETIONS):
        response = post(server, path, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert message_part in error["message"]


def test_a_request_gets_400_when_grammar_and_stop_tokens_leave_no_token(server: DryServer) -> None:
    response = post(server, COMPLETIONS, structured_outputs={"choice": ["ab"]}, stop_token_ids=[97])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "structured_outputs"
    assert "stop_token_ids leave no token" in response.json()["error"]["message"]
    assert texts(post(server, COMPLETIONS, structured_outputs={"choice": ["still here"]})) == ["still here"]
