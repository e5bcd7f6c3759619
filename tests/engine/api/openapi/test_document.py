"""The description of the API: complete, readable by tools, and true of what a server answers."""

import json
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from mini_infer_engine.api import answers
from mini_infer_engine.api.app import make_app
from mini_infer_engine.api.dialects.openai.chat import ChatRequest
from mini_infer_engine.api.dialects.pooling.classify import CLASSIFY_PATHS
from mini_infer_engine.api.dialects.pooling.rerank import RERANK_PATHS
from mini_infer_engine.api.dialects.pooling.score import SCORE_PATHS
from mini_infer_engine.api.openapi.document import document, openapi
from mini_infer_engine.api.openapi.operations import OPERATIONS, Operation
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_web.api_docs import DOCS_PATHS, FAVICON_PATH
from tests.engine.server.dry_server import DryServer

API = json.loads(document())
MESSAGES = [{"role": "user", "content": "hi"}]


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_openapi_references_exist_and_every_schema_is_used() -> None:
    names = {reference.removeprefix("#/components/schemas/") for reference in references(API)}
    schemas = set(API["components"]["schemas"])
    assert names <= schemas
    events = {row.event.__name__ for row in OPERATIONS if row.event}  # named by descriptions of streams
    assert schemas <= names | events


def test_openapi_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for methods in API["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


def test_openapi_fields_equal_those_of_requests() -> None:
    chat = API["components"]["schemas"]["ChatRequest"]
    assert set(chat["properties"]) == {*ChatRequest.__struct_fields__, *ChatRequest.neutral}
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["messages"]
    batch = API["components"]["schemas"]["BatchChatRequest"]["properties"]["messages"]
    assert batch["items"] == chat["properties"]["messages"]
    assert API["components"]["schemas"]["CompletionRequest"]["required"] == ["prompt"]
    assert API["components"]["schemas"]["ResponsesRequest"]["required"] == ["input"]
    assert set(API["components"]["schemas"]["MessagesRequest"]["required"]) == {"model", "messages", "max_tokens"}


def test_openapi_describes_event_streams() -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        content = openapi()["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}


def test_openapi_parameters_equal_those_of_path_and_query() -> None:
    answered = {
        path: {(value["name"], value["in"]) for value in methods["get"].get("parameters", ())}
        for path, methods in API["paths"].items()
        if "get" in methods
    }
    own = ("response_id", "path")
    assert answered["/v1/responses/{response_id}"] == {own, ("stream", "query"), ("starting_after", "query")}
    pages = {("limit", "query"), ("order", "query"), ("after", "query")}
    assert answered["/v1/responses/{response_id}/input_items"] == pages | {own}
    assert answered["/v1/models/{name}"] == {("name", "path")}


INTERNAL = {
    "/v1/responses/compact",
    "/metrics",
    "/drain",
    "/role",
    "/prompt_assets",
    "/kv_snapshot",
    "/kv_prefetch",
    "/docs",
    "/openapi.json",
}


def test_openapi_describes_every_client_path() -> None:

    routes = {
        (re.sub(r":path}", "}", route.path), method)
        for route in make_app(Mock(options=ServerOptions())).routes
        for method in getattr(route, "methods", None) or ()
        if route.path not in INTERNAL.union(DOCS_PATHS[1:], [FAVICON_PATH]) and method != "HEAD"
    }
    assert routes == {(row.path, row.method.upper()) for row in OPERATIONS}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES]},
    "/invocations": {"messages": MESSAGES},
    "/v1/embeddings": {"input": ["hi", "ho"]},
    **{path: {"text_1": "hi", "text_2": ["ho", "hi"]} for path in SCORE_PATHS},
    **{path: {"query": "hi", "documents": ["ho", {"text": "hi"}]} for path in RERANK_PATHS},
    "/v1/messages": {"model": "dry", "max_tokens": 5, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "dry", "messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": ["hi", "ho"]},
    "/v1/kv_hints": {"prompt": "hi", "kv_hints": {"done": True}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104, 105]},
}


def response_id(server: DryServer) -> str:
    made = server.client.post("/v1/responses", json={"input": "hi", "background": True}).json()
    return str(made["id"])


ANSWERED = [row for row in OPERATIONS if row.path not in CLASSIFY_PATHS]
"""The operations that a dry run answers, which is no classifier; those have tests in dialects/test_pooling.py."""


@pytest.mark.parametrize("operation", ANSWERED, ids=lambda row: f"{row.method} {row.path}")
def test_answers_match_their_openapi_schema(operation: Operation, server: DryServer) -> None:
    path = operation.path.replace("{name}", "dry")
    if "{response_id}" in path:
        path = path.replace("{response_id}", response_id(server))
    body = BODIES.get(operation.path)
    assert (body is None) == (operation.request is None)
    answer = (
        server.client.request(operation.method, path, json=body)
        if body
        else server.client.request(operation.method, path)
    )
    assert answer.status_code == 200, answer.text
    if operation.answer is None:
        assert answer.content == b""
    elif operation.is_list:
        assert msgspec.json.decode(answer.content, type=list[operation.answer])  # type: ignore[name-defined]
    else:
        msgspec.json.decode(answer.content, type=operation.answer)
    if body is not None and operation.event is not None:
        stream = server.client.post(path, json=body | {"stream": True}).text
        data = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
        assert data
        for event in data:
            msgspec.json.decode(event, type=operation.event)


EVERYTHING: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"return_token_ids": True, "service_tier": "flex", "n": 2},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
    "/v1/completions": [
        {"return_token_ids": True, "n": 2},
        {"echo": True},
    ],
    "/v1/messages": [{"return_token_ids": True}, {"thinking": {"type": "adaptive"}}],
    "/v1/responses": [
        {"return_token_ids": True},
        {"enable_response_messages": True},
    ],
    "/v1/embeddings": [{"encoding_format": "base64", "dimensions": 3}],
    "/v1/rerank": [{"return_documents": False, "top_n": 1}],
    "/tokenize": [{"return_token_strs": True}],
}
"""Fields by which answers get parts that they have not otherwise."""


def undescribed(answered: Any, described: Any, where: str = "") -> list[str]:
    """The keys of an answer that its description drops."""
    if isinstance(answered, dict) and isinstance(described, dict):
        extra = [f"{where}.{key}" for key in answered.keys() - described.keys()]
        shared = answered.keys() & described.keys()
        return extra + [name for key in shared for name in undescribed(answered[key], described[key], f"{where}.{key}")]
    if isinstance(answered, list) and isinstance(described, list):
        pairs = zip(answered, described, strict=True)
        return [name for one, other in pairs for name in undescribed(one, other, f"{where}[]")]
    return []


@pytest.mark.parametrize(
    ("operation", "fields"),
    [(row, fields) for row in ANSWERED if row.request for fields in [{}, *EVERYTHING.get(row.path, [])]],
    ids=lambda value: value.path if isinstance(value, Operation) else "-".join(value) or "plain",
)
def test_every_key_is_described_when_answers_have_all_that_they_may(
    operation: Operation, fields: dict[str, Any], server: DryServer
) -> None:
    body = BODIES[operation.path] | fields
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    raw = server.client.post(operation.path, json=whole)
    assert raw.status_code == 200, raw.text
    answer_list = raw.json() if operation.is_list else [raw.json()]
    found = set()
    for answered in answer_list:
        found.update(undescribed(answered, msgspec.to_builtins(msgspec.convert(answered, operation.answer))))
    if operation.event is not None:
        stream = server.client.post(operation.path, json=body | {"stream": True}).text
        for line in stream.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                described = msgspec.to_builtins(msgspec.convert(event, operation.event))
                found.update(f"event{name}" for name in undescribed(event, described))
    assert found == set()


@pytest.mark.parametrize("operation", [row for row in OPERATIONS if row.request], ids=lambda row: row.path)
def test_errors_match_their_openapi_schema(operation: Operation, server: DryServer) -> None:
    answer = server.client.post(operation.path, json={"no_such_field": 1})
    assert str(answer.status_code) in API["paths"][operation.path]["post"]["responses"]
    msgspec.json.decode(answer.content, type=operation.error)
    assert operation.error in (answers.ErrorAnswer, answers.MessagesErrorAnswer)


def test_the_docs_page_loads_its_own_servers_openapi(server: DryServer) -> None:
    page = server.client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "http" not in page.text, "it works without internet"
    for path in DOCS_PATHS:
        assert server.client.get(path).status_code == 200
    assert server.client.get("/openapi.json").json() == API
