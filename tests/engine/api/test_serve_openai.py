"""The dry-run server as a client sees it: real processes, real sockets, the openai package."""

import asyncio
import gzip
import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest
import zstandard
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import mini_infer_engine
from tests.engine.server.dry_server import DryServer, wait_until

QUESTION = "What does textwrap.dedent do? é€😀"
ANSWER = f"You said: {QUESTION}"


def chat(content: str = QUESTION, **fields: object) -> dict[str, object]:
    return {"model": "dry", "messages": [{"role": "user", "content": content}], **fields}


def post(server: DryServer, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
    return server.client.post(path, json=body)


def stream(server: DryServer, body: dict[str, object], path: str = "/v1/chat/completions") -> list[dict[str, object]]:
    """The events of a stream, which must end with [DONE]."""
    response = post(server, body | {"stream": True}, path)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture(scope="module")
def client(server: DryServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_dry_server_starts_quickly_without_torch(server: DryServer) -> None:
    assert server.start_cpu_s < 6  # of both processes, which take 2 s side by side on a quiet machine
    for pid in (server.process.pid, server.core_pid):
        with open(f"/proc/{pid}/maps") as maps:
            assert "torch" not in maps.read()


def test_health_models_and_unknown_paths_answer(server: DryServer) -> None:
    assert server.client.get("/healthz").json()["status"] == "ok"
    assert server.client.get("/healthz").json()["model"] == "dry"
    assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["dry", "other-name"]
    described = server.client.get("/v1/models/other-name").json()
    assert described["id"] == "other-name"
    assert (described["tool_call_parser"], described["reasoning_parser"]) == ("hermes", None)
    assert "tool calls: hermes; reasoning: none" in server.text_of_log
    for response, status in (
        (server.client.get("/v1/models/none"), 404),
        (server.client.get("/nothing"), 404),
        (server.client.get("/v1/chat/completions"), 405),
        (server.client.delete("/healthz"), 405),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_vllm_paths_answer_as_its_clients_expect(server: DryServer) -> None:
    for response in (server.client.get("/health"), server.client.get("/ping"), server.client.post("/ping")):
        assert (response.status_code, response.content) == (200, b"")
    assert server.client.get("/version").json() == {"version": mini_infer_engine.__version__}
    assert server.client.get("/load").json() == {"server_load": 0}
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "messages" in info["chat_template"]
    assert server.client.get("/v1/models").json()["data"][0]["created"] > 1_700_000_000


def test_openai_client_chats_with_and_without_stream(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model="dry", messages=messages)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    chunks = list(
        client.chat.completions.create(
            model="dry",
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    usage = chunks[-1].usage
    assert not chunks[-1].choices
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.completion_tokens == len(ANSWER.encode()) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_usage_is_in_every_event_when_continuous_usage_is_requested(server: DryServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = post(server, chat()).json()["usage"]
    for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", {"model": "dry", "prompt": "abc"})):
        chunks = stream(server, body | {"stream_options": options}, path)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]  # type: ignore[index]
        assert counts == sorted(counts)
        assert counts[0] <= 1
        assert chunks[-2]["usage"].items() <= chunks[-1]["usage"].items()  # type: ignore[attr-defined]
        if path.endswith("chat/completions"):
            assert counts[-1] == whole["completion_tokens"]


def without_vllms(body: Any) -> Any:
    """vLLM's fields beside OpenAI's: why a choice ended, and of whole answers what was not asked for."""
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
        assert all(part.pop(name, None) is None for part in (body, *body["choices"]))
    for choice in body["choices"]:
        assert ("stop_reason" in choice) == (choice["finish_reason"] is not None)
        choice.pop("stop_reason", None)
    return body


def test_answers_have_openais_fields_and_no_others(server: DryServer) -> None:
    ChatCompletion.model_validate(without_vllms(post(server, chat()).json()), extra="forbid")
    for chunk in map(without_vllms, stream(server, chat())):
        ChatCompletionChunk.model_validate(chunk, extra="forbid")
        assert "usage" not in chunk
    body = {"model": "dry", "prompt": "ab"}
    Completion.model_validate(without_vllms(post(server, body, "/v1/completions").json()), extra="forbid")
    *chunks, last = stream(server, body, "/v1/completions")
    Completion.model_validate(without_vllms(last), extra="forbid")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)  # type: ignore[index]


def test_choices_keep_their_indices_when_there_are_several_prompts(server: DryServer) -> None:
    body = {"model": "dry", "prompt": ["one", [ord("t"), ord("w"), ord("o")]], "n": 2}
    answer = post(server, body, "/v1/completions").json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["usage"]["prompt_tokens"] == 6
    texts = ["", "", "", ""]
    for chunk in stream(server, body, "/v1/completions"):
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            texts[choice["index"]] += choice["text"]
    assert texts == ["one", "one", "two", "two"]


@pytest.mark.parametrize("streams", [False, True])
def test_text_ends_when_a_stop_string_spans_tokens(server: DryServer, streams: bool) -> None:
    fields = {"stop": ["dent do", "never"], "stream_options": {"include_usage": True}}
    if streams:
        *chunks, usage_chunk = stream(server, chat(**fields))
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)  # type: ignore[index]
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], usage_chunk["usage"]  # type: ignore[index]
    else:
        answer = post(server, chat(stop=fields["stop"])).json()
        text, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        usage = answer["usage"]
    assert text == ANSWER[: ANSWER.index("dent do")]
    assert reason == "stop"
    assert usage["completion_tokens"] == ANSWER.index("dent do") + len("dent do")  # type: ignore[index]


def test_cached_tokens_are_reported_when_a_prompt_is_repeated(server: DryServer) -> None:
    prompt = f"{time.time()} " * 20
    cached = [
        post(server, chat(prompt, max_tokens=1)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[0] < 48 < cached[1]
    salted = post(server, chat(prompt, max_tokens=1, cache_salt="mine")).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_length_min_tokens_and_token_ids_are_respected(server: DryServer) -> None:
    answer = post(server, chat("x", max_completion_tokens=3, return_token_ids=True)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("You", "length")
    assert answer["token_ids"] == list(b"You")
    long = post(server, chat("x", min_tokens=40, max_tokens=50)).json()
    assert 40 <= long["usage"]["completion_tokens"] <= 50
    endless = post(server, chat("x", ignore_eos=True, max_tokens=33)).json()
    assert (endless["usage"]["completion_tokens"], endless["choices"][0]["finish_reason"]) == (33, "length")
    by_id = post(server, chat("x", stop_token_ids=[ord(" ")])).json()["choices"][0]
    assert (by_id["message"]["content"], by_id["stop_reason"]) == ("You", ord(" "))
    by_string = stream(server, chat("x", stop="said"))[-1]["choices"][0]  # type: ignore[index]
    assert (by_string["finish_reason"], by_string["stop_reason"]) == ("stop", "said")


def test_the_clients_request_id_is_used_and_returned(server: DryServer) -> None:
    response = server.client.post("/v1/chat/completions", json=chat("x"), headers={"x-request-id": "my-id"})
    assert response.headers["x-request-id"] == "my-id"
    assert response.json()["id"] == "chatcmpl-my-id"
    completion = post(server, {"model": "dry", "prompt": "x", "max_tokens": 1}, "/v1/completions")
    assert completion.json()["id"] == "cmpl-" + completion.headers["x-request-id"]
    refused = server.client.post("/v1/chat/completions", json={}, headers={"x-request-id": "other"})
    assert refused.status_code == 400
    assert refused.headers["x-request-id"] == "other"
    bad = server.client.get("/healthz", headers={"x-request-id": "a b"})
    assert bad.status_code == 400


def test_many_concurrent_clients_get_their_own_text(server: DryServer) -> None:
    async def send_request(client: httpx.AsyncClient, index: int) -> None:
        body = chat(f"question {index} " * (index % 5 + 1), stream=bool(index % 2))
        headers = {"x-request-id": "not-unique"} if index % 3 else {}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200
        if index % 2:
            events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line]
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        else:
            text = response.json()["choices"][0]["message"]["content"]
        assert text == f"You said: {body['messages'][0]['content']}"  # type: ignore[index]

    async def run() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(send_request(client, index) for index in range(64)))

    asyncio.run(run())
    assert server.client.get("/drain").json() == {"draining": False, "running": 0}


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("streams", [False, True])
def test_a_sequence_is_aborted_when_its_client_disconnects(server: DryServer, streams: bool) -> None:
    body = json.dumps(chat("x", ignore_eos=True, max_tokens=4000, stream=streams)).encode()
    before = server.metric("vllm:generation_tokens_total")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(HEAD % len(body) + body)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:generation_tokens_total") - before < 4000
    assert server.client.get("/drain").json()["running"] == 0


def test_a_retry_gets_its_own_text_when_it_has_the_same_request_id(server: DryServer) -> None:
    headers = {"x-request-id": "again"}
    for attempt in range(10):
        first = {"model": "dry", "prompt": "wrong", "ignore_eos": True, "max_tokens": 3000, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=first, headers=headers) as response:
            next(response.iter_raw())
        second = {"model": "dry", "prompt": f"right {attempt}", "max_tokens": 10}
        answer = server.client.post("/v1/completions", json=second, headers=headers).json()
        assert answer["choices"][0]["text"] == f"right {attempt}"


def test_tokenize_and_detokenize_answer(server: DryServer) -> None:
    answer = post(server, {"prompt": "hé"}, "/tokenize").json()
    assert answer == {"count": 3, "tokens": [104, 195, 169], "token_strs": None, "max_model_len": 4096}
    assert post(server, {"tokens": [104, 195, 169]}, "/detokenize").json() == {"prompt": "hé"}
    rendered = post(server, {"messages": [{"role": "user", "content": "x"}]}, "/tokenize").json()["tokens"]
    assert post(server, {"tokens": rendered}, "/detokenize").json()["prompt"].startswith("<|im_start|>user\nx")
    assert post(server, {"tokens": [999]}, "/detokenize").status_code == 400


def test_prompt_assets_have_an_etag(server: DryServer) -> None:
    response = server.client.get("/prompt_assets")
    assets = response.json()
    assert "tokenizer.json" in assets["files"]
    assert response.headers["etag"] == f'"{assets["revision"]}"'
    again = server.client.get("/prompt_assets", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_metrics_report_requests_tokens_and_kv_pool(server: DryServer) -> None:
    before = server.metric("mini_infer_engine_generation_tokens_total")
    post(server, chat("x", max_tokens=5))
    assert server.metric("mini_infer_engine_generation_tokens_total") == before + 5
    text = server.client.get("/metrics").text
    for name in ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:lora_requests_info"):
        assert f"\n{name}{{" in text
    assert 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",kv_cache_max_concurrency="' in text


def test_an_incomplete_character_is_omitted_when_max_tokens_cuts_it(server: DryServer) -> None:
    count = len("You said: 😀".encode()) - 1
    assert post(server, chat("😀", max_tokens=count)).json()["choices"][0]["message"]["content"] == "You said: "
    chunks = stream(server, chat("😀", max_tokens=count))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "You said: "  # type: ignore[index]


def test_aborts_are_counted_when_clients_disconnect(server: DryServer) -> None:
    name = 'mini_infer_engine_requests_total{finish_reason="abort"}'
    body = chat("x", ignore_eos=True, max_tokens=3000, stream=True)

    def aborted() -> float:
        found = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(name)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    before = aborted()
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_raw())
    wait_until(lambda: aborted() == before + 1)


def test_a_body_is_refused_before_it_is_read_when_it_is_too_large(server: DryServer) -> None:
    response = post(server, chat("x" * 300_000))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

    def parts() -> object:
        yield from [b"x" * 50_000] * 10

    chunked = server.client.post("/v1/chat/completions", content=parts(), headers=JSON)  # type: ignore[arg-type]
    assert chunked.status_code == 413


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_only_json_bodies_are_read_also_when_compressed(server: DryServer, path: str) -> None:
    body = json.dumps(chat("x" * 1000)).encode()
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        refused = server.client.post(path, content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (415, "not_json")
    for encoding, packed in (("gzip", gzip.compress(body)), ("zstd", zstandard.compress(body))):
        response = server.client.post(path, content=packed, headers=JSON | {"content-encoding": encoding})
        assert "JSON" not in response.text
        assert (response.status_code == 200) == (path == "/v1/chat/completions" or path == "/tokenize"), response.text
        bomb = gzip.compress(bytes(10**7)) if encoding == "gzip" else zstandard.compress(bytes(10**7))
        refused = server.client.post(path, content=bomb, headers=JSON | {"content-encoding": encoding})
        assert refused.status_code == 413


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSED: list[tuple[str, object, int, str | None]] = [
    (CHAT, {"model": "nope", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
    (CHAT, chat("x" * 5000), 400, "messages"),
    (CHAT, chat("x", max_tokens=5000), 400, "max_tokens"),
    (CHAT, chat("x", max_completion_tokens=5000), 400, "max_completion_tokens"),
    (CHAT, chat("x", stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, {"model": "dry", "messages": []}, 400, "messages"),
    (CHAT, {"model": "dry", "messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"model": "dry"}, 400, "messages"),
    (COMPLETIONS, {"model": "dry"}, 400, "prompt"),
    (COMPLETIONS, {"model": "dry", "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"model": "dry", "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"model": "dry", "prompt": [1, 99_999]}, 400, "prompt"),
    (COMPLETIONS, {"model": "dry", "prompt": "x", "stop_token_ids": [999]}, 400, "stop_token_ids"),
    (COMPLETIONS, {"model": "dry", "prompt": ["x"] * 100, "n": 2}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 1, "stop_token_ids": list(range(256))}, 400, "min_tokens"),
    (COMPLETIONS, [], 400, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSED)
def test_a_request_is_refused_by_name_when_it_cannot_be_served(
    server: DryServer, path: str, body: object, status: int, param: str | None
) -> None:
    response = post(server, body, path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert "Traceback" not in response.text


def test_both_lengths_are_reported_when_a_prompt_is_too_long(server: DryServer) -> None:
    error = post(server, {"model": "dry", "prompt": "x" * 5000}, "/v1/completions").json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"]
    assert "4096" in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"model": "dry"', b"[" * 100_000, b'{"a": NaN}'])
def test_a_request_is_refused_when_its_json_is_malformed(server: DryServer, body: bytes) -> None:
    response = server.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stop": ["dedent", "zzz"]}, {"max_tokens": 20}, {"min_tokens": 50}])
def test_a_resumed_stream_sends_the_remaining_events(
    server: DryServer, fields: dict[str, object], include_usage: bool
) -> None:
    requested = chat(return_token_ids=True, stream_options={"include_usage": include_usage}, **fields)
    whole = stream(server, requested)
    choices = [event["choices"][0] for event in whole if event["choices"]]  # type: ignore[index]  # JSON
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert len(tokens) > 10
    for answered in range(1, len(choices)):
        known = [token for choice in choices[:answered] for token in choice["token_ids"]]
        if not known:
            continue
        rest = stream(server, requested | {"resume_token_ids": known})
        left = [event["choices"][0] for event in rest if event["choices"]]  # type: ignore[index]  # JSON

        def text(chosen: list[Any]) -> str:
            return "".join(choice["delta"].get("content", "") for choice in chosen)

        assert text(choices[:answered]) + text(left) == text(choices)
        assert left[-1]["finish_reason"] == choices[-1]["finish_reason"]
        assert "role" not in left[0]["delta"]
        if include_usage:
            assert rest[-1]["usage"]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]  # type: ignore[index]
            assert rest[-1]["usage"]["prompt_tokens"] == whole[-1]["usage"]["prompt_tokens"]  # type: ignore[index]


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream": False}, {"resume_token_ids": [99_999]}])
def test_resume_token_ids_are_refused_when_the_request_cannot_be_resumed(
    server: DryServer, fields: dict[str, object]
) -> None:
    response = post(server, chat(resume_token_ids=[65], stream=True) | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "resume_token_ids"
