"""/v1/responses of the dry-run server, by the openai package: a lone engine, which keeps responses itself."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, response_create_params

from mini_infer_engine.api.dialects.responses.responses_api import ResponsesRequest
from tests.engine.server.dry_server import DryServer, wait_until

MODEL = "dry"


@pytest.fixture(scope="module")
def client(server: DryServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0)


def create(client: openai.OpenAI, text: object = "hello", **fields: Any) -> Response:
    made: Response = client.responses.create(model=MODEL, input=text, **fields)  # type: ignore[arg-type]
    return made


def test_every_field_of_openais_schema_is_known() -> None:
    fields = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert fields <= {*ResponsesRequest.__struct_fields__, *ResponsesRequest.neutral}


def test_a_response_has_the_fields_of_its_request_and_usage(client: openai.OpenAI) -> None:
    answered: Any = {"metadata": {"a": "b"}, "user": "me", "service_tier": "flex"}
    response = create(client, instructions="be brief", max_output_tokens=100, top_p=0.5, **answered)
    assert (response.service_tier, create(client).service_tier) == ("flex", "default")
    assert response.output_text == "You said: hello"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("be brief", {"a": "b"}, 100)
    assert (response.top_p, response.temperature, response.tools, response.tool_choice) == (0.5, 1.0, [], "auto")
    assert response.id.startswith("resp_")
    assert response.output[0].id is not None
    assert response.output[0].id.startswith("msg_")
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens == len("You said: hello") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


REQUIRED = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "user",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
]
"""Of a response, by the schema of https://www.openresponses.org; some may be null, and none may be missing."""


def test_responses_have_every_required_field_of_the_schema(server: DryServer) -> None:
    requested = {"tools": [{"type": "function", "name": "look"}], "presence_penalty": 0.5}
    form = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
    for more in (requested, requested | {"background": True}, {"tools": [], "text": {"format": form}}):
        answered = server.client.post("/v1/responses", json={"model": MODEL, "input": "hi"} | more).json()
        assert set(REQUIRED) <= answered.keys()
        assert answered["presence_penalty"] == more.get("presence_penalty", 0.0)
        assert answered["tools"] in ([], [{"type": "function", "name": "look"} | dict.fromkeys(TOOL_FIELDS)])
        assert answered["text"]["format"] in ({"type": "text"}, form | {"description": None, "strict": None})


TOOL_FIELDS = ("description", "parameters", "strict")
"""That a function of an answer always has."""


def test_response_deltas_are_padded_when_obfuscation_is_requested(server: DryServer) -> None:
    body = {"model": MODEL, "input": "hello", "stream": True, "stream_options": {"include_obfuscation": True}}
    for options, is_padded in ((True, True), (False, False)):
        body["stream_options"] = {"include_obfuscation": options}
        events = server.client.post("/v1/responses", json=body).text.split("\n\n")[:-1]
        contents = [json.loads(event.partition("\ndata: ")[2]) for event in events]
        assert [content["sequence_number"] for content in contents] == list(range(len(events)))
        deltas = [index for index, content in enumerate(contents) if content["type"].endswith("delta")]
        assert {"obfuscation" in contents[index] for index in deltas} == {is_padded}
        assert ({(len(events[index].encode()) + 2) % 64 for index in deltas} == {0}) is is_padded


def test_a_responses_stream_adds_up_to_the_response(client: openai.OpenAI) -> None:
    whole = create(client)
    events = list(client.responses.create(model=MODEL, input="hello", stream=True))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert events[0].response.id == last.response.id == client.responses.retrieve(last.response.id).id  # type: ignore[union-attr]


def test_a_response_is_incomplete_and_can_be_continued_when_max_output_tokens_cuts_it(client: openai.OpenAI) -> None:
    for stream in (False, True):
        made = client.responses.create(model=MODEL, input="hello", max_output_tokens=4, stream=stream)
        response: Any = list(made)[-1].response if stream else made  # type: ignore[union-attr]
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"
        assert create(client, "more", previous_response_id=response.id).output_text == "You said: more"


def test_previous_responses_precede_the_prompt(client: openai.OpenAI) -> None:
    first = create(client, "my name is Mark", instructions="be brief")
    second = create(client, "and yours?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    whole = create(
        client,
        [
            {"role": "user", "content": "my name is Mark"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and yours?"},
        ],
        store=False,
    )
    assert second.usage is not None
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    items = client.responses.input_items.list(second.id, order="asc")
    assert [(item.type, getattr(item, "role", None)) for item in items] == [
        ("message", "user"),
        ("message", "assistant"),
        ("message", "user"),
    ]
    other = create(client, "and hers?", previous_response_id=first.id)
    assert other.output_text == "You said: and hers?"


def test_a_response_is_not_found_when_it_was_deleted_or_not_stored(client: openai.OpenAI) -> None:
    unstored, stored = create(client, store=False), create(client)
    assert client.responses.retrieve(stored.id) == stored
    client.responses.delete(stored.id)
    for response in (unstored, stored):
        with pytest.raises(openai.NotFoundError, match="Response with id"):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, previous_response_id=response.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_is_not_found_when_another_key_asks_for_it(server: DryServer, client: openai.OpenAI) -> None:
    response = create(client)
    other = client.with_options(api_key="two")
    for call in (
        other.responses.retrieve,
        other.responses.delete,
        other.responses.cancel,
        other.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        create(other, previous_response_id=response.id)
    assert server.client.get(f"/v1/responses/{response.id}").status_code == 404


def finished(client: openai.OpenAI, response_id: str) -> Response:
    wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def test_a_background_response_completes(client: openai.OpenAI) -> None:
    begun = create(client, background=True)
    assert (begun.status, begun.output, begun.background) == ("queued", [], True)
    response = finished(client, begun.id)
    assert (response.status, response.output_text, response.background) == ("completed", "You said: hello", True)
    assert client.responses.cancel(begun.id).status == "completed"
    with pytest.raises(openai.BadRequestError, match=r"background.*`store`"):
        create(client, background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(create(client).id)


def test_a_background_stream_can_be_left_and_resumed(client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input="hello", background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    later = list(client.responses.retrieve(first.response.id, stream=True, starting_after=1))
    assert later[0].sequence_number == 2
    assert later[-1].type == "response.completed"
    again = list(client.responses.retrieve(first.response.id, stream=True, starting_after=1))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in later]
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(create(client).id, stream=True)


@pytest.mark.parametrize(
    "query", ["stream=true&starting_after=-5", "stream=perhaps", "starting_after=x", f"starting_after={'9' * 5000}"]
)
def test_the_error_names_a_query_parameter_when_it_is_invalid(server: DryServer, query: str) -> None:
    body = {"model": MODEL, "input": "hi", "background": True, "stream": True}
    first = server.client.post("/v1/responses", json=body).text.split("\n\n")[0]
    response_id = json.loads(first.partition("\ndata: ")[2])["response"]["id"]
    answer = server.client.get(f"/v1/responses/{response_id}?{query}")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("stream", "starting_after")


def test_cancelling_a_background_response_stops_the_engine(server: DryServer, client: openai.OpenAI) -> None:
    before = server.metric("vllm:num_requests_running")
    begun = create(client, "x" * 3000, background=True)
    wait_until(lambda: client.responses.retrieve(begun.id).status == "in_progress")
    assert client.responses.cancel(begun.id).status == "cancelled"
    wait_until(lambda: server.metric("vllm:num_requests_running") <= before)
    assert client.responses.retrieve(begun.id).status == "cancelled"


def test_a_background_response_has_its_error_when_it_fails(client: openai.OpenAI) -> None:
    begun = create(client, "x" * 5000, background=True)
    response = finished(client, begun.id)
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, background=True, reasoning={"effort": "banana"})
    assert caught.value.param == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"magic": 1}, "magic"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"reasoning": {"effort": "banana"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "any"}}}, "text.format.schema"),
        ({"include": ["everything"]}, "include[0]"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 5}, "previous_response_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": "x" * 5000}, "input"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(server: DryServer, fields: dict[str, Any], param: str) -> None:
    answer = server.client.post("/v1/responses", json={"model": MODEL, "input": "hi"} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    first = create(client)
    assert first.usage is not None
    counted = client.responses.input_tokens.count(model=MODEL, input="hello")
    assert counted.input_tokens == first.usage.input_tokens
    second = create(client, "more", previous_response_id=first.id)
    assert second.usage is not None
    counted = client.responses.input_tokens.count(model=MODEL, input="more", previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens


def test_vllms_generation_fields_work_on_responses(client: openai.OpenAI) -> None:
    stopped = create(client, "abc", extra_body={"stop": "d: a", "seed": 4, "top_k": 3, "ignore_eos": False})
    assert stopped.output_text == "You sai"
    longer = create(client, "abc", extra_body={"ignore_eos": True}, max_output_tokens=30)
    assert longer.usage is not None
    assert longer.usage.output_tokens == 30
    raw = create(client, "abc", extra_body={"enable_response_messages": True}).to_dict()
    assert raw["input_messages"][0]["type"] == "raw_message_tokens"  # type: ignore[index]
    assert "abc" in raw["input_messages"][0]["message"]  # type: ignore[index]


def test_nothing_is_stored_when_a_gateway_stores_responses(server: DryServer) -> None:
    kept = {"id": "resp_mine", "previous_response_id": "resp_other", "background": True}
    answer = server.client.post(
        "/v1/responses",
        json={"model": MODEL, "input": "hi"},
        headers={"x-mini-infer-response": json.dumps(kept)},
    ).json()
    assert {name: answer[name] for name in kept} == kept
    assert server.client.get("/v1/responses/resp_mine").status_code == 404


def test_a_resumed_stream_sends_the_remaining_events(server: DryServer) -> None:
    kept = {"x-mini-infer-response": '{"id": "resp_1", "created_at": 5}'}
    body = {"model": MODEL, "input": "hello there", "stream": True, "return_token_ids": True, "seed": 1}

    def events(**fields: Any) -> list[dict[str, Any]]:
        answer = server.client.post("/v1/responses", json=body | fields, headers=kept)
        assert answer.status_code == 200, answer.text
        return [json.loads(event.partition("data: ")[2]) for event in answer.text.split("\n\n")[:-1]]

    def comparable(answered: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Without numbers and ids, and deltas joined: steps may be cut elsewhere."""
        text = "".join(event.get("delta", "") for event in answered)
        others = [event for event in answered if event["type"] not in ("token_ids", "response.output_text.delta")]
        for event in others:
            for response in (event, event.get("response", {})):
                for name in ("sequence_number", "completed_at"):
                    response.pop(name, None)
            event.get("response", {}).get("usage", {}).pop("input_tokens_details", None)
        return [{"text": text}, *others]

    whole = events()
    marks = [index for index, event in enumerate(whole) if event["type"] == "token_ids"]
    for mark in marks[::5] + marks[-1:]:
        known = [token_id for event in whole[: mark + 1] for token_id in event.get("token_ids", [])]
        left = events(resume_token_ids=known)
        assert left[0].get("sequence_number", 0) == 0
        assert comparable(left) == comparable([dict(event) for event in json.loads(json.dumps(whole[mark + 1 :]))])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses", 405),
        ("POST", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/resp_1/cancel", 405),
        ("GET", "/v1/responses/resp_1/other", 404),
        ("GET", "/v1/responses/resp_1", 404),
        ("DELETE", "/v1/responses/resp_1", 404),
        ("POST", "/v1/responses/resp_1/cancel", 404),
    ],
)
def test_other_paths_and_methods_get_their_error(server: DryServer, method: str, path: str, status: int) -> None:
    answer: httpx.Response = server.client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_response_is_aborted_when_its_client_disconnects(server: DryServer) -> None:
    before = server.metric("vllm:num_requests_running")
    body = {"model": MODEL, "input": "x" * 3000, "stream": True}
    with server.client.stream("POST", "/v1/responses", json=body) as answer:
        next(answer.iter_bytes())
    wait_until(lambda: server.metric("vllm:num_requests_running") <= before)


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_compact_is_not_found_by_name_when_a_client_asks_for_it(server: DryServer, method: str) -> None:
    answer = server.client.request(method, "/v1/responses/compact", json={"model": MODEL, "input": "hi"})
    assert answer.status_code == 404
    if method == "POST":
        assert answer.json()["error"]["code"] == "unsupported_path"
