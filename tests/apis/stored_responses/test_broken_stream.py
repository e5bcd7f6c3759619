"""Streams of responses that break off: what their clients get, by the types of openai-python."""

import json
from typing import Any

import pytest
from openai.types.responses import responses_server_event
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter

from mini_infer_apis.dialects.response_object import new_response
from mini_infer_apis.stored_responses.broken_stream import MAX_FIRST_BYTES, StreamErrors, websocket_error
from mini_infer_apis.stored_responses.recorder import data_of, events_in, response_in
from mini_infer_web.api_errors import ApiError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ERROR = ApiError(502, "the engine died", code="upstream_failed").body()
BROKEN = b"data: " + json.dumps(ERROR).encode() + b"\n\n"
CREATED = {"type": "response.created", "response": new_response({}, "resp_1", "m", 5, "in_progress")}


def event(content: dict[str, Any], number: int) -> bytes:
    body = json.dumps(content | {"sequence_number": number}, separators=(",", ":"))
    return f"event: {content['type']}\ndata: {body}\n\n".encode()


def translated(*pieces: bytes) -> list[dict[str, Any]]:
    errors = StreamErrors()
    data = b"".join(errors.translated(piece) for piece in pieces)
    return [json.loads(data_of(one)) for one in events_in(data)]


def test_a_stream_error_becomes_response_failed() -> None:
    begun = event(CREATED, 0) + event(CREATED | {"type": "response.in_progress"}, 1)
    delta = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "content_index": 0}
    piece = event(delta | {"delta": 'x,"sequence_number":9}', "logprobs": []}, 2)
    events = translated(begun, b": waiting\n\n", piece, BROKEN)
    for content in events:
        EVENT.validate_python(content)
    assert [content["sequence_number"] for content in events] == list(range(5))
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "upstream_failed", "the engine died")
    assert (failed["type"], failed["response"]["id"]) == ("response.failed", "resp_1")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine died"}


def test_an_error_event_has_no_response_when_none_was_created() -> None:
    (error,) = translated(b": waiting\n\n", BROKEN)
    assert (error["type"], error["sequence_number"]) == ("error", 0)


def test_a_response_is_not_repeated_when_it_is_very_long() -> None:
    long = CREATED | {"response": CREATED["response"] | {"instructions": "x" * MAX_FIRST_BYTES}}  # type: ignore[operator]
    events = translated(event(long, 0), BROKEN)
    assert [content["type"] for content in events] == ["response.created", "error"]
    assert events[-1]["sequence_number"] == 1


def test_a_failed_stream_is_recorded_as_failed() -> None:
    errors = StreamErrors()
    errors.translated(event(CREATED, 0))
    response = response_in(errors.translated(BROKEN))
    assert response is not None
    assert response["status"] == "failed"


@pytest.mark.parametrize(
    "piece", [b'{"error": {"message": "x"}}', b'data: {"error": "x"}\n\n', b'data: {"error"\n\n', b""]
)
def test_stream_bytes_are_unchanged_when_they_are_no_error(piece: bytes) -> None:
    assert StreamErrors().translated(piece) == piece


@pytest.mark.parametrize("data", [json.dumps(ERROR).encode(), data_of(StreamErrors().translated(BROKEN))])
def test_a_websocket_error_is_an_error_object(data: bytes) -> None:
    message = json.loads(websocket_error(data.replace(b'{"error": ', b'{"error":')))
    error = responses_server_event.ResponseWsError.model_validate(message)
    assert (error.error.code, error.error.message) == ("upstream_failed", "the engine died")
    other = b'{"type":"response.created"}'
    assert websocket_error(other) is other
