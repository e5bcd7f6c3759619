"""Fields of requests that need no model: what answers tell beside their text, and what prompts become."""

import json
from typing import Any

import pytest

from tests.engine.server.dry_server import DryServer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Zoë says hi"}]


def post(server: DryServer, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    source: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Some text"}
    answer = server.client.post(path, json={"max_tokens": 6} | source | fields)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(server: DryServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    source: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Some text"}
    body = {"max_tokens": 6, "stream": True} | source | fields
    lines = server.client.post(path, json=body).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def test_a_chats_prompt_token_ids_are_returned_once_in_the_first_event(server: DryServer) -> None:
    ids = server.client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    whole = post(server, CHAT, return_token_ids=True, n=2)
    assert whole["prompt_token_ids"] == ids
    assert all(len(choice["token_ids"]) == 6 and choice.get("prompt_token_ids") is None for choice in whole["choices"])
    first, *rest = events(server, CHAT, return_token_ids=True)
    assert first["prompt_token_ids"] == ids
    assert not any("prompt_token_ids" in event for event in rest)
    answered = [token for event in [first, *rest] for choice in event["choices"] for token in choice["token_ids"]]
    assert answered == post(server, CHAT, return_token_ids=True)["choices"][0]["token_ids"]
    plain = post(server, CHAT)  # vLLM's clients read these of every answer
    assert (plain["prompt_token_ids"], plain["prompt_logprobs"], plain["choices"][0]["token_ids"]) == (None, None, None)


def test_a_completions_prompt_token_ids_are_returned_once_per_choice(server: DryServer) -> None:
    ids = list(b"Some text")
    whole = post(server, COMPLETION, return_token_ids=True, n=2)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids, ids]
    found: dict[int, list[Any]] = {}
    for event in events(server, COMPLETION, return_token_ids=True, n=2):
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice.get("prompt_token_ids"))
    assert all(answered[0] == ids and not any(answered[1:]) for answered in found.values())
    requested = events(server, COMPLETION, return_token_ids=True, return_prompt_token_ids=False)
    assert not any("prompt_token_ids" in choice for event in requested for choice in event["choices"])


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 4}, b"text"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, b"Some"),
        ({"truncate_prompt_tokens": 100}, b"Some text"),
    ],
)
def test_prompts_are_truncated_by_truncate_prompt_tokens(
    server: DryServer, fields: dict[str, Any], left: bytes
) -> None:
    found = post(server, COMPLETION, return_token_ids=True, **fields)
    assert bytes(found["choices"][0]["prompt_token_ids"]) == left
    assert found["usage"]["prompt_tokens"] == len(left)
    echoed = post(server, COMPLETION, echo=True, **fields)["choices"][0]
    assert echoed["text"] == left.decode() + found["choices"][0]["text"], "what the model saw of it"


def test_a_prompt_is_truncated_to_the_context_when_truncate_prompt_tokens_is_minus_one(server: DryServer) -> None:
    found = post(server, COMPLETION, prompt="x" * 50_000, truncate_prompt_tokens=-1)
    assert found["usage"]["prompt_tokens"] == 4096 - 6
    error = post(server, COMPLETION, 400, truncate_prompt_tokens=4096)["error"]
    assert error["param"] == "truncate_prompt_tokens"
    assert post(server, COMPLETION, 400, truncate_prompt_tokens=0)["error"]["param"] == "prompt"


def test_an_answer_has_the_request_id_of_the_body(server: DryServer) -> None:
    assert post(server, CHAT, request_id="mine-1")["id"] == "chatcmpl-mine-1"
    assert {event["id"] for event in events(server, COMPLETION, request_id="mine-1")} == {"cmpl-mine-1"}
    assert post(server, CHAT, 400, request_id="two words")["error"]["param"] == "request_id"


def test_service_tier_is_returned(server: DryServer) -> None:
    assert post(server, CHAT, service_tier="flex")["service_tier"] == "flex"
    assert {event["service_tier"] for event in events(server, CHAT, service_tier="auto")} == {"default"}
    assert "service_tier" not in post(server, CHAT)


def test_stream_events_are_padded_when_obfuscation_is_requested(server: DryServer) -> None:
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 9, "stream_options": {"include_obfuscation": True}}
    text = server.client.post(CHAT, json=body).text
    padded = [event + "\n\n" for event in text.split("\n\n") if '"choices":[{' in event]
    assert {len(event.encode()) % 64 for event in padded} == {0}
    assert all(json.loads(event.removeprefix("data: "))["obfuscation"] is not None for event in padded)
    assert "obfuscation" not in server.client.post(CHAT, json=body | {"stream_options": {}}).text


def test_an_echoed_chat_starts_with_the_continued_message(server: DryServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once "}]
    requested = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    plain = post(server, CHAT, **(requested | {"echo": False}))["choices"][0]["message"]["content"]
    assert post(server, CHAT, **requested)["choices"][0]["message"]["content"] == "Once " + plain
    answered = [event["choices"][0]["delta"].get("content", "") for event in events(server, CHAT, **requested)]
    assert "".join(answered) == "Once " + plain


def test_an_output_finishes_when_repetition_is_detected(server: DryServer) -> None:
    requested = {"max_pattern_size": 3, "min_count": 3}
    found = post(server, COMPLETION, prompt="abababab.", max_tokens=20, repetition_detection=requested)["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (
        "ababab",
        "repetition",
        "repetition_detected",
    )
    for wrong in ({"max_pattern_size": 3}, {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}, {"size": 3}):
        error = post(server, COMPLETION, 400, repetition_detection=wrong)["error"]
        assert error["param"].startswith("repetition_detection")


def test_fields_are_null_when_they_are_not_requested_and_vllm_has_them(server: DryServer) -> None:
    choice = post(server, COMPLETION)["choices"][0]
    assert {choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")} == {None}


def test_timings_are_returned_when_the_flag_is_set() -> None:
    with DryServer("--enable-per-request-metrics", "--enable-force-include-usage", "--dry-run-step-ms", "3") as server:
        found = post(server, CHAT)["metrics"]
        assert found["generation_time_ms"] > 3
        assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 5)
        assert found["time_to_first_token_ms"] >= 0
        assert found["queue_time_ms"] >= 0
        assert found["tokens_per_second"] > 0
        assert "metrics" not in post(server, CHAT, n=2)
        *rest, last = events(server, CHAT)
        assert all(event["usage"]["prompt_tokens"] for event in rest)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 6
        assert last["metrics"].keys() == found.keys()
