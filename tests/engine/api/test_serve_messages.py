"""Anthropic's Messages API of a dry-run server, as its clients see it."""

import json
from typing import Any

import httpx
import pytest

from tests.engine.server.dry_server import DryServer

QUESTION = "What does textwrap.dedent do? é€😀"
ANSWER = f"You said: {QUESTION}"
PATH = "/v1/messages"


def message(content: object = QUESTION, **fields: Any) -> dict[str, Any]:
    return {"model": "dry", "max_tokens": 500, "messages": [{"role": "user", "content": content}], **fields}


def post(server: DryServer, body: dict[str, Any], path: str = PATH) -> httpx.Response:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta", "x-api-key": "k"}
    return server.client.post(path, json=body, headers=headers)


def whole(server: DryServer, body: dict[str, Any]) -> dict[str, Any]:
    response = post(server, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def events(server: DryServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    response = post(server, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for text in response.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells, put together as a client does it."""
    assert stream[0]["type"] == "message_start"
    assert stream[-1]["type"] == "message_stop"
    answered: dict[str, Any] = stream[0]["message"]
    for event in stream[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(answered["content"])
            answered["content"].append(event["content_block"] | {"_json": ""})
        elif kind == "content_block_delta":
            block, delta = answered["content"][event["index"]], event["delta"]
            for name, target in (("text", "text"), ("thinking", "thinking"), ("partial_json", "_json")):
                block[target] = block.get(target, "") + delta.get(name, "") if name in delta else block.get(target)
            block |= {"signature": delta["signature"]} if "signature" in delta else {}
        elif kind == "message_delta":
            answered |= event["delta"] | {"usage": answered["usage"] | event["usage"]}
    for block in answered["content"]:
        arguments = block.pop("_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
        for name in [name for name, value in block.items() if value is None]:
            del block[name]
    return answered


def test_a_message_has_anthropics_shape(server: DryServer) -> None:
    response = post(server, message(system="Be kind."))
    answer = response.json()
    assert answer.pop("id") == f"msg_{response.headers['request-id']}"
    assert response.headers["request-id"] == response.headers["x-request-id"]
    usage = answer.pop("usage")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "dry",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert usage["output_tokens"] == len(ANSWER.encode()) + 1


def test_a_stream_equals_the_whole_answer(server: DryServer) -> None:
    stream = events(server, message())
    kinds = [event["type"] for event in stream]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    answered, answer = joined(stream), whole(server, message())
    assert answered["usage"].pop("output_tokens") == answer["usage"].pop("output_tokens")
    for both in (answered, answer):
        del both["id"], both["usage"]
    assert answered == answer


def test_usage_counts_cache_reads_cache_writes_and_the_rest(server: DryServer) -> None:
    body = message("A sentence that nobody else sends, long enough for some blocks of the cache. " * 3)
    counted = post(server, {name: body[name] for name in ("model", "messages")}, PATH + "/count_tokens").json()
    cold, warm = whole(server, body)["usage"], whole(server, body)["usage"]
    start = events(server, body)[0]["message"]["usage"]
    for usage in (cold, warm, start):
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[name] for name in parts) == counted["input_tokens"]
        assert 0 <= usage["input_tokens"] < 16
    assert cold["cache_creation_input_tokens"] > cold["cache_read_input_tokens"]
    assert warm["cache_read_input_tokens"] >= 128
    assert start["output_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "You", "max_tokens", None),
        ({"max_tokens": 0}, None, "max_tokens", None),
        ({"stop_sequences": ["textwrap", "no"]}, "You said: What does ", "stop_sequence", "textwrap"),
    ],
)
def test_stop_reason_by_ending(
    server: DryServer, fields: dict[str, Any], text: str | None, reason: str, sequence: str | None
) -> None:
    for answered in (whole(server, message(**fields)), joined(events(server, message(**fields)))):
        assert answered["content"] == ([] if text is None else [{"type": "text", "text": text}])
        assert (answered["stop_reason"], answered["stop_sequence"]) == (reason, sequence)
        assert "max_tokens" not in fields or answered["usage"]["output_tokens"] == fields["max_tokens"]


TOOL = {"name": "get_weather", "input_schema": {"properties": {"city": {"type": "string"}}, "required": ["city"]}}
CALL = 'I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def test_a_tool_call_is_a_block_and_its_result_is_accepted(server: DryServer) -> None:
    body = message(CALL, tools=[TOOL])  # the pretended model says it again
    for answered in (whole(server, body), joined(events(server, body))):
        text, call = answered["content"]
        assert text == {"type": "text", "text": "You said: I look."}
        assert call.pop("id").startswith("toolu_")
        assert call == {"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich"}}
        assert answered["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "20 °C"}
    body["messages"] += [
        {"role": "assistant", "content": [text, call | {"id": "toolu_1"}]},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
    ]
    assert whole(server, body)["content"] == [{"type": "text", "text": "You said: Thanks."}]


@pytest.mark.parametrize("content", [QUESTION, CALL])
def test_a_resumed_stream_sends_the_remaining_events(server: DryServer, content: str) -> None:
    body = message(content, tools=[TOOL], return_token_ids=True, seed=1)
    *events_before, message_delta, _ = events(server, body)
    steps: list[tuple[list[int], list[dict[str, Any]]]] = []  # the ids of each, and its events
    fresh: list[dict[str, Any]] = []
    for event in events_before[2:]:
        if event["type"] == "ping":
            steps.append((event["token_ids"], fresh))
            fresh = []
        else:
            fresh.append(event)
    for at in range(1, len(steps) + 1, 7):
        known = [token_id for ids, _ in steps[:at] for token_id in ids]
        *rest, end, last = events(server, body | {"resume_token_ids": known})
        assert (end["delta"], last["type"]) == (message_delta["delta"], "message_stop")
        assert end["usage"]["output_tokens"] == message_delta["usage"]["output_tokens"]
        left = [event for _, answered in steps[at:] for event in answered] + fresh
        assert without_ids([event for event in rest if event["type"] != "ping"]) == without_ids(left)


def without_ids(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for event in stream:
        event.get("content_block", {}).pop("id", None)
    return stream


def test_no_tool_is_called_when_tool_choice_is_none(server: DryServer) -> None:
    answered = whole(server, message(CALL, tools=[TOOL], tool_choice={"type": "none"}))
    assert [block["type"] for block in answered["content"]] == ["text"]
    assert answered["stop_reason"] == "end_turn"


def test_max_tokens_is_reduced_when_it_exceeds_the_context(server: DryServer) -> None:
    assert whole(server, message("x", max_tokens=10_000_000))["stop_reason"] == "end_turn"


def test_a_prefilled_assistant_message_is_continued(server: DryServer) -> None:
    body = message("ab")
    body["messages"].append({"role": "assistant", "content": "You"})
    counted = post(server, {name: body[name] for name in ("model", "messages")}, PATH + "/count_tokens").json()
    prompt = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nYou"
    text = {"model": "dry", "prompt": prompt, "add_special_tokens": False}
    assert counted["input_tokens"] == server.client.post("/tokenize", json=text).json()["count"]


def test_count_tokens_answers_when_the_prompt_exceeds_the_context(server: DryServer) -> None:
    counted = post(server, {"model": "dry", "messages": message("x" * 100_000)["messages"]}, PATH + "/count_tokens")
    assert counted.json()["input_tokens"] > 100_000


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        (message(model="none"), 404, "not_found_error", "'none'"),
        (message(temperature=2), 400, "invalid_request_error", "temperature"),
        (
            message([{"type": "image", "source": {"type": "url", "url": "https://h/a.png"}}]),
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        (message("x" * 100_000), 400, "invalid_request_error", "context"),
        (message(stop_sequences=[""]), 400, "invalid_request_error", "stop_sequences"),
        ({"model": "dry"}, 400, "invalid_request_error", "max_tokens"),
    ],
)
def test_errors_have_anthropics_shape(
    server: DryServer, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    response = post(server, body)
    answer = response.json()
    assert response.status_code == status
    assert answer["type"] == "error"
    assert answer["error"]["type"] == kind
    assert words in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"]


def test_http_errors_have_anthropics_shape(server: DryServer) -> None:
    for response, status in (
        (server.client.get(PATH), 405),
        (server.client.post(PATH + "/batches", json={}), 404),
        (server.client.post(PATH, content="x", headers={"content-type": "text/plain"}), 415),
        (server.client.post(PATH, content="{", headers={"content-type": "application/json"}), 400),
        (server.client.post(PATH, json={}, headers={"x-request-id": "a b"}), 400),
    ):
        assert response.status_code == status
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_max_tokens_is_reduced_when_it_is_a_huge_integer(server: DryServer) -> None:
    assert whole(server, message(max_tokens=10**30))["stop_reason"] == "end_turn"
