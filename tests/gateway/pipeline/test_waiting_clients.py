"""What a client sees of a request that takes long: comments that keep its stream alive, and a limit to the whole."""

import json
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway, until

WAITING = b": waiting\n\n"


def split(stream: bytes) -> tuple[int, bytes]:
    """How many comments it begins with, and the rest."""
    rest = stream.lstrip()
    count = 0
    while rest.startswith(WAITING):
        rest, count = rest[len(WAITING) :], count + 1
    return count, rest


def error_in(event: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(event.removeprefix(b"data: "))["error"]
    return error


async def test_sse_comments_are_sent_when_a_stream_has_not_begun() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, sse_keepalive_s=0.05) as gateway:
        engine.answer_delay_s = 0.3
        async with gateway.chat("hi", stream=True) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            comments, rest = split(await response.read())
        assert comments >= 2
        assert rest == b"".join(engine.chunks)
        engine.answer_delay_s = 0.0
        async with gateway.chat("hi", stream=True) as response:
            assert split(await response.read()) == (0, b"".join(engine.chunks))
            assert "x-mini-infer-pod" in response.headers


async def test_a_request_is_retried_when_comments_were_sent_already() -> None:
    async with (
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        running_gateway(a.endpoint, b.endpoint, sse_keepalive_s=0.05) as gateway,
    ):
        a.answer_delay_s = b.answer_delay_s = 0.2
        a.status = b.status = 500
        async with gateway.chat("hi", stream=True) as response:
            comments, event = split(await response.read())
        assert comments >= 2
        assert error_in(event)["message"] == "status 500"
        assert len(a.bodies) == len(b.bodies) == 1, "no comment kept it from being tried on the other one"
        a.status = 200
        async with gateway.chat("hi", stream=True) as response:
            assert split(await response.read())[1] == b"".join(a.chunks)


@pytest.mark.parametrize("status", [400, 429])
async def test_an_error_is_sent_as_event_when_comments_were_sent_already(status: int) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, sse_keepalive_s=0.05) as gateway:
        engine.status, engine.answer_delay_s = status, 0.2
        engine.error_body = {"error": {"message": "a bad field", "param": "top_p", "code": "odd"}}
        async with gateway.chat("hi", stream=True) as response:
            assert response.status == 200
            _, event = split(await response.read())
            error = error_in(event)
            assert (error["message"], error["param"], error["code"]) == ("a bad field", "top_p", "odd")
        engine.answer_delay_s = 0.0
        async with gateway.chat("hi", stream=True) as response:
            assert response.status == status, "before a comment it has its own status"


async def test_a_request_is_retried_when_its_engine_sent_only_comments() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b, running_gateway(a.endpoint, b.endpoint) as gateway:
        for engine in (a, b):
            engine.chunks = [WAITING, b": and on\n\n", *engine.chunks]
        a.die_after = 2
        for _ in range(4):
            async with gateway.chat("hi", stream=True) as response:
                assert response.status == 200
                assert (await response.read()).startswith(b'data: {"n":0}')
        assert a.bodies, "it was tried, and died behind its comments"


async def test_a_request_gets_504_when_its_engine_sends_only_comments() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, request_deadline_s=0.4) as gateway:
        engine.chunks, engine.chunk_delay_s = [WAITING] * 1000, 0.05
        async with gateway.chat("hi", stream=True) as response:
            assert response.status == 504
        await until(lambda: engine.cancelled == 1)


@pytest.mark.parametrize("by_header", [True, False])
async def test_a_request_ends_when_its_timeout_has_passed(by_header: bool) -> None:
    limit: dict[str, float] = {} if by_header else {"request_timeout_s": 0.3}
    headers = {"x-request-timeout": "0.3"} if by_header else {"x-request-timeout": "50"}
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, **limit) as gateway:
        engine.chunk_delay_s, engine.answer_delay_s = 0.1, 0.0
        engine.chunks *= 20
        body = {"model": "m", "prompt": "hi", "stream": True}
        async with gateway.client.post(gateway.url + "/v1/completions", json=body, headers=headers) as response:
            events = (await response.read()).strip().split(b"\n\n")
            assert (response.status, error_in(events[-1])["code"]) == (200, "request_timeout")
            assert len(events) > 1
        engine.answer_delay_s = 60.0
        async with gateway.client.post(gateway.url + "/v1/completions", json=body, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (408, "request_timeout")
        await until(lambda: engine.cancelled == 1)  # The stream; the other was cut before its answer began.
        lines = gateway.app.metrics.text().decode().splitlines()
        assert any("_requests_total" in line and '"408"' in line for line in lines)


async def test_it_may_be_waiting_here_or_have_comments_when_its_time_is_up() -> None:
    async with (
        FakeEngine("a") as engine,
        running_gateway(engine.endpoint, request_timeout_s=1.0, sse_keepalive_s=0.02) as gateway,
    ):
        engine.answer_delay_s = 60.0
        async with gateway.chat("hi", stream=True) as response:
            comments, event = split(await response.read())
            assert (response.status, error_in(event)["code"]) == (200, "request_timeout")
            assert comments >= 2


async def test_a_request_is_refused_when_its_timeout_header_is_no_time() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        for value in ("soon", "-1", "0", "nan"):
            body, headers = {"model": "m", "prompt": "hi"}, {"x-request-timeout": value}
            async with gateway.client.post(gateway.url + "/v1/completions", json=body, headers=headers) as response:
                assert (response.status, (await response.json())["error"]["param"]) == (400, "x-request-timeout")
