"""The OpenAPI description of the requests to an engine, and to a gateway before it. Made once, at the first request."""

import re
from functools import cache
from typing import Any

import msgspec

from mini_infer_engine import __version__
from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_engine.api.openapi.operations import OPERATIONS, Operation
from mini_infer_engine.api.openapi.schemas import Schema, reference, schemas_of

_STATUSES = {
    400: "The request is at fault; the message names all fields that are",
    401: "There is no API key, or it is not one of the server's",
    404: "There is no such model",
    405: "The path takes another method",
    408: "The body, or the answer, did not come in time",
    413: "The body is too large",
    415: "The body is no JSON by its Content-Type, or compressed in a way that is not known",
    429: "Too many requests wait: come again later",
    431: "The headers are too large",
    500: "The server failed",
    502: "The gateway's engine failed",
    503: "Nobody can take the request now",
    504: "The gateway's engine did not begin to answer in time",
}
_OF_BODIES = (400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 502, 503, 504)
_WITHOUT_BODIES = (400, 401, 404, 405, 431, 500, 502, 503, 504)
_PROBES = (400, 405, 431, 500, 503)


@cache
def document() -> bytes:
    """Returns the description as JSON."""
    return encode_json(openapi())


def openapi() -> dict[str, Any]:
    """Returns the description as an object."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    used = {kind for row in OPERATIONS for kind in (row.request, row.answer, row.event, row.error) if kind}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mini-infer",
            "version": __version__,
            "description": "OpenAI's, Anthropic's and vLLM's APIs, as far as they are here. What is not is refused by "
            "name. A field that is null is a field that is left out.",
        },
        # A server without keys needs none.
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas_of(used - {dict}).items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": f"{operation.method}{re.sub(r'[/{}]+', '_', operation.path).rstrip('_')}",
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {"200": _answer(operation)} | _errors(operation),
    }
    if parameters := _parameters(operation):
        made["parameters"] = parameters
    if operation.is_probe:
        made["security"] = []
    if operation.request is not None:
        body = {"application/json": {"schema": _schema(operation.request)}}
        made["requestBody"] = {"required": True, "content": body}
    return made


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    """Returns the parameters of the path, and those of the query."""
    path = re.findall(r"{(\w+)}", operation.path)
    query_fields: dict[str, Schema] = {}
    if operation.query is not None:
        query_fields = msgspec.json.schema_components([operation.query])[1][operation.query.__name__]["properties"]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in path
    ] + [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query_fields.items()]


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": "An empty body"}
    schema = _schema(operation.answer)
    if operation.is_list:
        schema = {"type": "array", "items": schema}
    content = {"application/json": {"schema": schema}}
    if operation.event is None:
        return {"description": "The answer", "content": content}
    name = operation.event.__name__
    content["text/event-stream"] = {
        "schema": {"type": "string", "description": f"Server-sent events; the data of each is a {name}."}
    }
    return {"description": "The answer; with `stream: true`, server-sent events", "content": content}


def _schema(kind: type) -> Schema:
    return {"type": "object"} if kind is dict else reference(kind)


def _errors(operation: Operation) -> dict[str, Any]:
    kinds = _PROBES if operation.is_probe else _OF_BODIES if operation.request is not None else _WITHOUT_BODIES
    return {str(status): _error(operation, status) for status in sorted({*kinds, *operation.statuses})}


def _error(operation: Operation, status: int) -> dict[str, Any]:
    response: dict[str, Any] = {"description": _STATUSES[status]}
    if not (operation.is_probe and status == 503):  # which says more of the server, or nothing
        response["content"] = {"application/json": {"schema": reference(operation.error)}}
    return response
