"""Fields of requests that need a real model's probabilities, over HTTP on the demo model."""

import base64
import math
import struct
from typing import Any

import openai
import pytest

from tests.engine.server.dry_server import EngineServer

PROMPT = "The list is sorted, and then its names are"


def complete(demo: EngineServer, path: str = "completions", status: int = 200, **fields: Any) -> dict[str, Any]:
    source = {"messages": [{"role": "user", "content": "What is 2+2?"}]} if "chat" in path else {"prompt": PROMPT}
    answer = demo.client.post(f"/v1/{path}", json={"max_tokens": 12} | source | fields)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_beams_are_returned_as_choices_best_first(demo: EngineServer) -> None:
    found = complete(demo, n=4, use_beam_search=True, logprobs=1, max_tokens=10)
    choices = found["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in choices}) == 4
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert all(choice["finish_reason"] == "length" for choice in choices)
    assert scores == sorted(scores, reverse=True)
    assert found["usage"]["completion_tokens"] == 40
    (one,) = complete(demo, n=1, use_beam_search=True, max_tokens=10)["choices"]
    (greedy,) = complete(demo, temperature=0, max_tokens=10)["choices"]
    assert one["text"] == greedy["text"]


def test_a_chat_returns_beams_as_choices(demo: EngineServer) -> None:
    found = complete(
        demo, "chat/completions", n=3, use_beam_search=True, length_penalty=0.0, early_stopping=True, max_tokens=40
    )
    assert len({choice["message"]["content"] for choice in found["choices"]}) == 3
    assert {choice["finish_reason"] for choice in found["choices"]} == {"stop"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
        ({"use_beam_search": True, "stop": ["x"]}, "stop"),
        (
            {"use_beam_search": True, "repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
            "repetition_detection",
        ),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True, "n": 9}, "n"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_beam_search_is_refused_by_name_when_fields_conflict(
    demo: EngineServer, fields: dict[str, Any], param: str
) -> None:
    error = complete(demo, status=400, **fields)["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_the_best_outputs_are_returned_and_all_are_counted_when_best_of_is_set(demo: EngineServer) -> None:
    requested = {"temperature": 1.0, "seed": 5, "logprobs": 0, "max_tokens": 6}
    every = complete(demo, n=5, **requested)["choices"]
    likely = [sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"]) for choice in every]
    ranked = [choice["text"] for _, choice in sorted(zip(likely, every, strict=True), key=lambda one: -one[0])]
    found = complete(demo, n=2, best_of=5, **requested)
    assert [choice["text"] for choice in found["choices"]] == ranked[:2]
    assert found["usage"]["completion_tokens"] == sum(len(choice["logprobs"]["tokens"]) for choice in every)
    hidden = complete(demo, n=2, best_of=5, **(requested | {"logprobs": None}))["choices"]
    assert [choice["logprobs"] for choice in hidden] == [None, None]
    assert [choice["text"] for choice in hidden] == ranked[:2]


def test_log_probabilities_are_of_named_tokens_when_token_ids_are_given(demo: EngineServer) -> None:
    every = complete(demo, logprobs=-1, max_tokens=2, temperature=0, return_tokens_as_token_ids=True)
    tops = every["choices"][0]["logprobs"]["top_logprobs"]
    assert all(len(top) == 4096 for top in tops)
    named = [3, 1900, 7]
    requested = {"logprob_token_ids": named, "return_tokens_as_token_ids": True, "temperature": 0, "max_tokens": 2}
    reported = complete(demo, logprobs=5, **requested)["choices"][0]["logprobs"]
    for top, whole, token in zip(reported["top_logprobs"], tops, reported["tokens"], strict=True):
        assert set(top) == {token, *(f"token_id:{name}" for name in named)}
        assert {name: whole[name] for name in top} == pytest.approx(top)
    chat = complete(demo, "chat/completions", logprobs=True, top_logprobs=1, **requested)["choices"][0]["logprobs"]
    assert [one["token"] for one in chat["content"][0]["top_logprobs"]] == [f"token_id:{name}" for name in named]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"logprob_token_ids": [4096], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [], "logprobs": 1}, "logprob_token_ids"),
        ({"logprobs": -1, "max_tokens": 5000}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
    ],
    ids=str,
)
def test_log_probabilities_are_refused_when_they_cannot_be_computed(
    demo: EngineServer, fields: dict[str, Any], param: str
) -> None:
    assert complete(demo, status=400, **fields)["error"]["param"] == param


def embed(demo: EngineServer, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = demo.client.post("/v1/embeddings", json=fields)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_embeddings_are_returned_as_float_and_base64(demo: EngineServer) -> None:
    ids = demo.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    one = embed(demo, input=PROMPT)
    assert one["object"] == "list"
    assert one["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    vector = one["data"][0]["embedding"]
    assert len(vector) == 256
    assert math.hypot(*vector) == pytest.approx(1)
    assert embed(demo, input=ids)["data"] == one["data"]
    several = embed(demo, input=["Join", PROMPT])
    assert [item["index"] for item in several["data"]] == [0, 1]
    assert several["data"][1]["embedding"] == pytest.approx(vector, abs=1e-5)
    packed = embed(demo, input=PROMPT, encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack("<256f", base64.b64decode(packed))) == pytest.approx(vector)
    short = embed(demo, input=PROMPT, dimensions=8)["data"][0]["embedding"]
    assert math.hypot(*short) == pytest.approx(1)
    scale = math.hypot(*vector[:8])
    assert short == pytest.approx([value / scale for value in vector[:8]], abs=1e-6)
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    assert client.embeddings.create(model="demo", input=PROMPT).data[0].embedding == pytest.approx(vector)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": [5000]}, "input"),
        ({"input": "word " * 2000}, "input"),
        ({"input": "x", "dimensions": 257}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({}, "input"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_embedding_input_is_refused_by_name_when_it_is_invalid(
    demo: EngineServer, fields: dict[str, Any], param: str
) -> None:
    error = embed(demo, status=400, **fields)["error"]
    assert error["param"] == param
    assert "prompt" not in error["message"]
