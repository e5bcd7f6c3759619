"""Errors name the client's own fields, and leave the client's own words as they are, in every dialect."""

from typing import Any

import pytest

from tests.engine.server.dry_server import DryServer

USER = [{"role": "user", "content": "hi"}]
WORDS = [
    "messages",
    "stop is here",
    "response_format = 1",
    "max_completion_tokens must be",
    "reasoning_effort",
    "tools[0].function.name",
    "prompt",
    "messages[0].content",
]
"""Names of fields within the words of a client."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/completions": {"prompt": "hi"},
}


def error(server: DryServer, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.client.post(path, json={"model": "dry"} | BODIES[path] | fields)
    assert answer.status_code in (400, 404), answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("words", WORDS)
def test_a_models_name_is_quoted_as_it_is_when_it_looks_like_a_field(server: DryServer, path: str, words: str) -> None:
    assert f"the model {words!r} does not exist" in error(server, path, model=words)["message"]


@pytest.mark.parametrize("words", WORDS)
def test_a_tools_name_is_quoted_as_it_is_when_it_looks_like_a_field(server: DryServer, words: str) -> None:
    words = f"{words} ?"  # no name of a tool
    found = error(server, "/v1/responses", tools=[{"type": "function", "name": words}])
    assert found["param"] == "tools[0].name"
    assert repr(words) in found["message"]
    found = error(server, "/v1/messages", tools=[{"name": words, "input_schema": {}}])
    assert found["message"].startswith("tools[0].name is ")
    assert repr(words) in found["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"max_output_tokens": 100_000}, "max_output_tokens"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {"reasoning": {"effort": "banana"}}, "reasoning.effort"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strng"}}}},
            "text.format",
        ),
        ("/v1/responses", {"input": "x" * 150_000}, "input"),
        ("/v1/responses", {"stop": [""]}, "stop"),
        (
            "/v1/responses",
            {
                "tools": [
                    {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "a"}]},
                    {"type": "function", "name": "b", "parameters": {"type": "strng"}},
                ]
            },
            "tools[1].parameters.type",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "a b"}]}]},
            "tools[0].tools[0].name",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "a"}], "tool_choice": {"type": "function", "name": "b"}},
            "tool_choice.name",
        ),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 150_000}]}, "messages"),
        ("/v1/messages", {"tools": [{"name": "a", "input_schema": {"required": 5}}]}, "tools[0].input_schema.required"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strng"}}}},
            "output_config.format",
        ),
        ("/v1/embeddings", {"input": ["hi", {}]}, "input[1]"),
        ("/v1/embeddings", {"input": ["hi", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": ["hi", [1, -1]]}, "input[1]"),
        ("/v1/embeddings", {"input": ["hi", [1, 9_999]]}, "input[1]"),
        ("/v1/embeddings", {"input": ["hi", [1] * 40_000]}, "input[1]"),
        ("/v1/embeddings", {"input": ["hi"] * 2_049}, "input"),
        ("/v1/embeddings", {"prompt_name": "query"}, "prompt_name"),
        ("/v1/score", {"text_2": ["ho", 5]}, "text_2[1]"),
        ("/v1/score", {"text_2": ["ho", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"queries": "q", "documents": "d"}, "text_1"),
        ("/v2/rerank", {"query": ["hi"]}, "query"),
        ("/v2/rerank", {"documents": "ho"}, "documents"),
        ("/v2/rerank", {"documents": []}, "documents"),
        ("/v2/rerank", {"documents": [{"title": "ho"}]}, "documents[0]"),
        ("/v2/rerank", {"top_n": -1}, "top_n"),
        ("/v1/completions", {"prompt": ["hi", "x" * 150_000]}, "prompt[1]"),
    ],
)
def test_an_error_names_the_clients_field_when_the_chat_of_it_is_at_fault(
    server: DryServer, path: str, fields: dict[str, Any], param: str
) -> None:
    found = error(server, path, **fields)
    assert found.get("param", param) == param
    assert found["message"].startswith(param)


def test_long_names_are_cut_when_they_are_quoted(server: DryServer) -> None:
    long = "x" * 150_000
    for path, fields in (
        ("/v1/chat/completions", {long: 1}),
        ("/v1/chat/completions", {"stream": True, "stream_options": {long: 1}}),
        ("/v1/chat/completions", {"metadata": {long: 1}}),
        ("/v1/chat/completions", {"logit_bias": {long: 1}}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"tools": long}}),
        ("/v1/chat/completions", {"messages": [{"role": long, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": long}]}]}),
        ("/v1/chat/completions", {"structured_outputs": {long: 1}}),
        ("/v1/chat/completions", {"repetition_detection": {long: 1}}),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {long: 5}}}}]},
        ),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": long}),
        ("/v1/chat/completions", {"model": long}),
        ("/v1/responses", {long: 1}),
        ("/v1/responses", {"text": {long: 1}}),
        ("/v1/responses", {"input": [{"type": long}]}),
        ("/v1/responses", {"reasoning": {"summary": long}}),
        ("/v1/messages", {long: 1}),
        ("/v1/messages", {"speed": long}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": long}]}]}),
        ("/v1/embeddings", {long: 1}),
    ):
        answer = server.client.post(path, json={"model": "dry"} | BODIES[path] | fields)
        assert answer.status_code in (400, 404), answer.text[:500]
        assert len(answer.content) < 1500, (path, next(iter(fields))[:20])
