"""Anthropic's Messages API through the gateway: routed by the engine's own tokens, with errors its clients read."""

import json
from typing import Any

import aiohttp
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

PATH = "/v1/messages"
SYSTEM = "You are told many things, and the same ones each time. " * 8


def message(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}], **fields}


async def post(
    gateway: RunningGateway, body: object, path: str = PATH, **headers: str
) -> tuple[aiohttp.ClientResponse, bytes]:
    async with gateway.client.post(gateway.url + path, json=body, headers=headers) as response:
        return response, await response.read()


async def test_an_anthropic_message_is_routed_to_its_cached_prefix() -> None:
    async with (
        FakeEngine("a") as first,
        FakeEngine("b") as second,
        running_gateway(first.endpoint, second.endpoint) as gateway,
    ):
        await gateway.settled()
        response, _ = await post(gateway, message("one", system=SYSTEM))
        holder = response.headers["x-mini-infer-pod"]
        for text in ("two", "three", "four"):
            response, _ = await post(gateway, message(text, system=SYSTEM))
            assert response.headers["x-mini-infer-pod"] == holder
            assert int(response.headers["x-mini-infer-hit-tokens"]) >= len(SYSTEM) // 16 * 16
        engine = first if holder == "a" else second
        assert engine.hit_tokens >= 3 * (len(SYSTEM) // 16 * 16)


async def test_a_chat_and_an_anthropic_message_share_a_cached_prefix() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await post(gateway, message("one", system=[{"type": "text", "text": SYSTEM}]))
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "two"}]
        response, _ = await post(gateway, {"model": "m", "messages": messages}, "/v1/chat/completions")
        assert int(response.headers["x-mini-infer-hit-tokens"]) >= len(SYSTEM) // 16 * 16


async def test_count_tokens_is_answered_by_an_engine() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        body = message("hi")
        del body["max_tokens"]
        response, answer = await post(gateway, body, PATH + "/count_tokens")
        assert (response.status, json.loads(answer)["served_by"]) == (200, "a")
        assert [json.loads(sent) for sent in engine.bodies] == [body]


async def test_api_keys_are_stripped_and_anthropic_versions_forwarded() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await post(gateway, message("hi"), **{"x-api-key": "secret", "anthropic-version": "2023-06-01"})
        assert "x-api-key" not in engine.headers[0]
        assert engine.headers[0]["anthropic-version"] == "2023-06-01"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (message("hi", model="none"), 404, "not_found_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ([], 400, "invalid_request_error"),
    ],
)
async def test_gateway_errors_have_anthropics_shape_on_messages_paths(body: object, status: int, kind: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        for path in (PATH, PATH + "/count_tokens"):
            response, answer = await post(gateway, body, path)
            answered = json.loads(answer)
            assert (response.status, answered["type"], answered["error"]["type"]) == (status, "error", kind)
            assert [answered["request_id"]] == response.headers.getall("request-id")
            assert answered["request_id"] == response.headers["x-request-id"]
        assert engine.bodies == []


async def test_http_errors_have_anthropics_shape_on_messages_paths() -> None:
    async with running_gateway() as gateway:
        async with gateway.client.get(gateway.url + PATH) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")
        async with gateway.client.post(gateway.url + PATH, headers={"x-request-id": "a b"}) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (400, "invalid_request_error")


async def test_an_anthropic_stream_ends_with_an_error_event_when_its_engine_dies() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        engine.chunks = [b'event: ping\ndata: {"type":"ping"}\n\n'] * 3
        engine.die_after = 2
        response, data = await post(gateway, message("hi", stream=True))
        assert response.status == 200
        *pings, error = data.split(b"\n\n")[:-1]
        assert all(ping.startswith(b"event: ping\n") for ping in pings)
        answered = json.loads(error.removeprefix(b"event: error\ndata: "))
        assert (answered["type"], answered["error"]["type"]) == ("error", "api_error")
        assert answered["request_id"] == response.headers["request-id"]


async def test_an_engines_error_event_counts_as_in_band_error() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        engine.chunks = [b'event: error\ndata: {"type":"error","error":{}}\n\n']
        await post(gateway, message("hi", stream=True))
        await until(lambda: b'outcome="in_band_error"' in gateway.app.metrics.text())
