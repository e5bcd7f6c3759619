"""Responses over WebSocket, by the openai package and by hand."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses.response_steer_failed_event import ResponseSteerFailedEvent
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.engine.server.dry_server import DryServer, wait_until

MODEL = "dry"


@pytest.fixture(scope="module")
def client(server: DryServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0)


def dial(server: DryServer, path: str = "/v1/responses") -> ClientConnection:
    headers = {"authorization": "Bearer one"}
    return connect(server.url.replace("http", "ws") + path, additional_headers=headers, compression=None)


def send_request(connection: ClientConnection, **fields: Any) -> None:
    connection.send(json.dumps({"type": "response.create", "model": MODEL, **fields}))


def next_end(connection: ClientConnection) -> dict[str, Any]:
    """The last event of the next response, or its error."""
    while True:
        event: dict[str, Any] = json.loads(connection.recv(timeout=60))
        if event["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
            return event


def text_of(event: dict[str, Any]) -> str:
    assert event["type"] == "response.completed", event
    return str(event["response"]["output"][0]["content"][0]["text"])


def test_openai_client_continues_a_conversation_over_a_websocket(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        previous, texts = None, []
        for text in ("hello", "again"):
            connection.response.create(model=MODEL, input=text, previous_response_id=previous, store=False)  # type: ignore[arg-type]
            numbers = []
            for event in connection:
                numbers.append(getattr(event, "sequence_number", None))
                if event.type == "response.completed":
                    previous = event.response.id
                    texts.append(event.response.output_text)
                    break
            assert numbers == list(range(len(numbers)))
        assert texts == ["You said: hello", "You said: again"]


def test_unstored_responses_belong_to_their_websocket_and_stored_ones_to_the_key(
    server: DryServer, client: openai.OpenAI
) -> None:
    with dial(server) as connection:
        send_request(connection, input="hello", store=False)
        local = next_end(connection)["response"]["id"]
        send_request(connection, input="more", previous_response_id=local)
        stored = next_end(connection)["response"]["id"]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(local)
    with pytest.raises(openai.BadRequestError, match="not found"):
        client.responses.create(model=MODEL, input="x", previous_response_id=local)
    # What is stored holds what its connection knew.
    items = client.responses.input_items.list(stored, order="asc")
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
    made = client.responses.create(model=MODEL, input="and now?", previous_response_id=stored)
    assert made.output_text == "You said: and now?"


def test_input_is_kept_for_a_later_response_when_generate_is_false(server: DryServer) -> None:
    with dial(server) as connection:
        send_request(connection, input="a beginning", generate=False, store=False)
        event = next_end(connection)
        assert event["response"]["output"] == []
        send_request(connection, input="hello", previous_response_id=event["response"]["id"], store=False)
        done = next_end(connection)
        assert text_of(done) == "You said: hello"
        send_request(connection, input="hello", store=False)
        assert done["response"]["usage"]["input_tokens"] > next_end(connection)["response"]["usage"]["input_tokens"]


def test_the_connection_stays_when_a_request_has_an_error(server: DryServer) -> None:
    with dial(server) as connection:
        for fields, status, param in (
            ({"input": "x", "previous_response_id": "resp_no"}, 400, "previous_response_id"),
            ({"input": "x", "temperature": 9}, 400, "temperature"),
            ({"input": "x", "background": True}, 400, "background"),
            ({"input": "x", "stream_id": 5}, 400, "stream_id"),
            ({"input": "x", "type": "response.cancel"}, 400, "type"),
            ({"input": "x", "model": "other"}, 404, "model"),
            ({}, 400, "input"),
        ):
            send_request(connection, **fields)
            event = next_end(connection)
            assert (event["type"], event["status"], event["error"]["param"]) == ("error", status, param), fields
            assert event["error"]["message"]
        connection.send("nonsense")
        assert next_end(connection)["error"]["code"] == "invalid_json"
        send_request(connection, input="hello")
        assert text_of(next_end(connection)) == "You said: hello"


def test_steer_input_is_refused_and_returned(client: openai.OpenAI) -> None:
    with client.responses.connect() as line:
        line.send({"type": "response.steer", "previous_response_id": "resp_1", "input": "be brief"})
        event = line.recv()
        assert isinstance(event, ResponseSteerFailedEvent)
        assert event.error.code == "steering_not_supported"
        assert (event.steer.previous_response_id, event.steer.input) == ("resp_1", "be brief")
        line.response.create(model=MODEL, input="hello")
        assert line.recv().type == "response.created"


def test_websocket_streams_run_concurrently_and_each_in_order(server: DryServer) -> None:
    with dial(server) as connection:
        for lane in ("a", "b"):
            for text in ("one", "two"):
                send_request(connection, input=f"{lane} {text}", stream_id=lane)
        ends = [next_end(connection) for _ in range(4)]
        for lane in ("a", "b"):
            answered = [text_of(event) for event in ends if event["stream_id"] == lane]
            assert answered == [f"You said: {lane} one", f"You said: {lane} two"]


def test_websocket_requests_are_refused_when_too_many_wait(server: DryServer) -> None:
    with dial(server) as connection:
        for number in range(17):
            send_request(connection, input="x" * 300, stream_id=str(number))
        ends = [next_end(connection) for _ in range(17)]
        refused = [event["error"]["code"] for event in ends if event["type"] == "error"]
        assert refused == ["too_many_responses"]


def test_requests_are_aborted_when_a_websocket_closes(server: DryServer) -> None:
    before = server.metric("vllm:num_requests_running")
    with dial(server) as connection:
        send_request(connection, input="x" * 3000)
        connection.recv(timeout=60)
    wait_until(lambda: server.metric("vllm:num_requests_running") <= before)


def test_a_websocket_is_refused_when_its_path_is_unknown(server: DryServer) -> None:
    with pytest.raises(InvalidStatus):
        dial(server, "/v1/chat/completions")
