"""The demo model behind the server: what a client gets from real tokens, a real tokenizer and a real page pool."""

import contextlib
import http.client
import json
from typing import Any

import httpx
import pytest

from mini_infer_engine import LLM, SamplingParams
from tests.engine.server.conftest import CONTEXT_TOKENS
from tests.engine.server.dry_server import EngineServer, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What does textwrap.dedent do?"}]
GREEDY = {"temperature": 0, "max_tokens": 60}
RANDOM = {"temperature": 2, "top_p": 1, "top_k": 0, "max_tokens": 30, "ignore_eos": True}


def post(server: EngineServer, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body)


def chat(server: EngineServer, **fields: Any) -> dict[str, Any]:
    response = post(server, CHAT, messages=MESSAGES, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    text: str = answer["choices"][index]["message"]["content"]
    return text


def stream(server: EngineServer, **fields: Any) -> tuple[str, str, dict[str, Any] | None]:
    """Text, finish reason and usage of a streamed chat."""
    response = post(server, CHAT, messages=MESSAGES, stream=True, **fields)
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()["usage"] if not chunks[-1]["choices"] else None
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return text, chunks[-1]["choices"][0]["finish_reason"], usage


@pytest.mark.parametrize("fields", [GREEDY, RANDOM | {"seed": 5}, GREEDY | {"max_tokens": 7}])
def test_a_stream_has_text_finish_reason_and_usage_of_the_whole_answer(
    demo: EngineServer, fields: dict[str, Any]
) -> None:
    chat(demo, **fields)  # from here on as many tokens are cached for one as for the other
    whole = chat(demo, **fields)
    text, reason, usage = stream(demo, **fields, stream_options={"include_usage": True})
    assert text == text_of(whole)
    assert text
    assert reason == whole["choices"][0]["finish_reason"]
    assert usage == whole["usage"]
    assert stream(demo, **fields) == (text, reason, None)


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 3, "presence_penalty": 2, "frequency_penalty": 2}])
def test_the_servers_text_equals_that_of_the_offline_api(demo: EngineServer, penalties: dict[str, float]) -> None:
    llm = LLM("demo", device="cpu", dtype="float32", kv_cache_memory=64_000_000, max_model_len=CONTEXT_TOKENS)
    [offline] = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=60, **penalties), use_tqdm=False)
    online = chat(demo, **GREEDY, **penalties)
    assert (text_of(online) == text_of(chat(demo, **GREEDY))) == (not penalties)
    assert text_of(online) == offline.outputs[0].text
    assert online["usage"]["prompt_tokens"] == len(offline.prompt_token_ids)
    assert online["usage"]["completion_tokens"] == len(offline.outputs[0].token_ids)


@pytest.mark.parametrize("streams", [False, True])
def test_text_ends_before_a_stop_string(demo: EngineServer, streams: bool) -> None:
    answer = chat(demo, **GREEDY)
    text = text_of(answer)
    stop = text[len(text) // 2 :][:5]
    fields = GREEDY | {"stop": ["never said", stop]}
    if streams:
        cut, reason, usage = stream(demo, **fields, stream_options={"include_usage": True})
    else:
        stopped = chat(demo, **fields)
        cut, reason, usage = text_of(stopped), stopped["choices"][0]["finish_reason"], stopped["usage"]
    assert (cut, reason) == (text[: text.index(stop)], "stop")
    assert usage is not None
    assert usage["completion_tokens"] < answer["usage"]["completion_tokens"]


def test_one_token_is_generated_when_max_tokens_is_one(demo: EngineServer) -> None:
    answer = chat(demo, temperature=0, max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert text_of(chat(demo, **GREEDY)).startswith(text_of(answer))


def test_text_repeats_by_seed_and_choices_of_a_request_differ(demo: EngineServer) -> None:
    first, again, other = (text_of(chat(demo, **RANDOM, seed=seed)) for seed in (11, 11, 12))
    assert first == again != other
    several = chat(demo, **RANDOM, seed=11, n=3)
    texts = [text_of(several, index) for index in range(3)]
    assert texts[0] == first
    assert len(set(texts)) == 3
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["usage"]["completion_tokens"] == 3 * RANDOM["max_tokens"]
    assert len({text_of(chat(demo, **RANDOM)) for _ in range(8)}) > 1  # of a model that is sure, two may be alike


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 2},
        {"logit_bias": {"5": 1000.0}},
        {"logit_bias": {"no id": 1.0}},
        {"allowed_token_ids": []},
        {"bad_words": ["x" * 1000]},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0},
        {"tool_choice": "required"},
        {"n": 0},
        {"n": 129},
        {"temperature": 2.5},
        {"top_p": 0},
        {"max_tokens": 0},
        {"no_such_field": 1},
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_an_unsupported_field_is_refused_in_openais_form(
    demo: EngineServer, fields: dict[str, Any], streams: bool
) -> None:
    response = post(demo, CHAT, messages=MESSAGES, stream=streams, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", next(iter(fields)))


def test_chats_and_completions_return_logprobs_with_and_without_stream(demo: EngineServer) -> None:
    llm = LLM("demo", device="cpu", dtype="float32", kv_cache_memory=64_000_000, max_model_len=CONTEXT_TOKENS)
    [offline] = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=20, logprobs=3), use_tqdm=False)
    expected = [
        max(reported.values(), key=lambda one: one.logprob).logprob for reported in offline.outputs[0].logprobs or ()
    ]
    fields = {"temperature": 0, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    whole = chat(demo, **fields)["choices"][0]["logprobs"]["content"]
    assert [position["logprob"] for position in whole] == pytest.approx(expected, abs=1e-4)
    assert all(position["top_logprobs"][0]["token"] == position["token"] for position in whole)
    assert all(len(position["top_logprobs"]) == 3 for position in whole)
    response = post(demo, CHAT, messages=MESSAGES, stream=True, **fields)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line]
    reported = [event["choices"][0]["logprobs"] for event in events]
    streamed = [position for logprobs in reported if logprobs for position in logprobs["content"]]
    assert [position["token"] for position in streamed] == [position["token"] for position in whole]
    assert chat(demo, temperature=0, max_tokens=3)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_returns_the_prompt_and_its_logprobs(demo: EngineServer, as_ids: bool) -> None:
    text = "The function textwrap.dedent removes"
    ids = post(demo, "/tokenize", prompt=text).json()["tokens"]
    body = {"prompt": ids if as_ids else text, "temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 4}
    whole = post(demo, COMPLETIONS, **body).json()
    choice, logprobs = whole["choices"][0], whole["choices"][0]["logprobs"]
    assert choice["text"].startswith(text)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:n])) for n in range(len(logprobs["tokens"]))]
    assert len(logprobs["tokens"]) == len(ids) + whole["usage"]["completion_tokens"]

    alone = post(demo, COMPLETIONS, **body | {"max_tokens": 0}).json()
    assert alone["choices"][0]["text"] == text
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][: len(ids)]
    assert alone["usage"]["completion_tokens"] == 0

    response = post(demo, COMPLETIONS, stream=True, **body)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        parts = [event["choices"][0]["logprobs"] for event in events]
        assert [value for part in parts if part for value in part[name]] == logprobs[name]


def test_logit_bias_and_bad_words_change_the_chosen_tokens(demo: EngineServer) -> None:
    message_part = chat(demo, temperature=0, max_tokens=5, return_token_ids=True)["choices"][0]["token_ids"]
    banned = chat(demo, temperature=0, max_tokens=5, return_token_ids=True, logit_bias={str(message_part[0]): -100})
    assert banned["choices"][0]["token_ids"][0] != message_part[0]
    only = chat(
        demo, temperature=0, max_tokens=5, return_token_ids=True, allowed_token_ids=message_part[:1], ignore_eos=True
    )
    assert only["choices"][0]["token_ids"] == message_part[:1] * 5
    word = text_of(chat(demo, temperature=0, max_tokens=20)).split()[0]
    assert not text_of(chat(demo, temperature=0, max_tokens=20, bad_words=[word])).startswith(word)


def test_prompt_logprobs_are_returned_beside_the_answer(demo: EngineServer) -> None:
    answer = chat(demo, temperature=0, max_tokens=1, prompt_logprobs=2)
    reported = answer["prompt_logprobs"]
    assert reported[0] is None
    assert len(reported) == answer["usage"]["prompt_tokens"]
    assert all(
        {"logprob", "rank", "decoded_token"} == set(one) for position in reported[1:] for one in position.values()
    )
    completion = post(demo, COMPLETIONS, prompt="one two three", prompt_logprobs=0, max_tokens=1).json()
    assert len(completion["choices"][0]["prompt_logprobs"]) == completion["usage"]["prompt_tokens"]


def test_both_lengths_are_reported_when_a_prompt_exceeds_the_context(demo: EngineServer) -> None:
    words = "word " * 2 * CONTEXT_TOKENS
    count = post(demo, "/tokenize", prompt=words).json()["count"]
    for path, body, length in (
        (COMPLETIONS, {"prompt": words}, count),
        (COMPLETIONS, {"prompt": [5] * CONTEXT_TOKENS}, CONTEXT_TOKENS),
        (CHAT, {"messages": [{"role": "user", "content": words}]}, None),
    ):
        response = post(demo, path, **body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(CONTEXT_TOKENS) in error["message"]
        assert length is None or str(length) in error["message"]
    longest = post(demo, COMPLETIONS, prompt=[5] * (CONTEXT_TOKENS - 1), ignore_eos=True).json()
    assert longest["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "prompt", [[4096], [5, -1], [2**40], [1.5], ["a", 5], [True], [[5], [4096]], [[5], []], 5, {"ids": [5]}]
)
def test_a_prompt_is_refused_when_it_has_invalid_token_ids(demo: EngineServer, prompt: object) -> None:
    response = post(demo, COMPLETIONS, prompt=prompt)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"].startswith("prompt")


@pytest.mark.parametrize("streams", [False, True])
def test_kv_pages_are_freed_when_a_client_disconnects(demo: EngineServer, streams: bool) -> None:
    """What it asks for takes the engine tens of seconds, so that no client is too slow to leave in the middle of it."""
    requested = {"prompt": [7] * 100, "ignore_eos": True, "max_tokens": 400, "n": 128, "stream": streams}
    before = demo.metric("mini_infer_engine_generation_tokens_total")
    with contextlib.closing(http.client.HTTPConnection(demo.url.removeprefix("http://"), timeout=60)) as client:
        client.request("POST", COMPLETIONS, json.dumps(requested), {"content-type": "application/json"})
        if streams:
            assert client.getresponse().read(1)
        wait_until(lambda: demo.metric("vllm:kv_cache_usage_perc") > 0)
    wait_until(lambda: demo.metric("vllm:num_requests_running") == demo.metric("vllm:kv_cache_usage_perc") == 0)
    assert demo.metric("mini_infer_engine_generation_tokens_total") - before < 128 * 400
