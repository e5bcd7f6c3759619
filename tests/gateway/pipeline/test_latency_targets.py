"""Latency targets at the gateway: headers reach the engine, and a refusal for them is tried elsewhere."""

import asyncio
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest

from mini_infer_contract.launch import SLO_UNATTAINABLE_HEADER
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

TARGETS = {"x-mini-infer-ttft-ms": "700", "x-mini-infer-itl-ms": "50", "x-mini-infer-deadline-ms": "9000"}
BUSY_TOKENS = 10_000_000


def chat(
    gateway: RunningGateway, text: str, headers: dict[str, str], **fields: object
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return gateway.client.post(gateway.url + "/v1/chat/completions", json=body, headers=headers)


def refuse(engine: FakeEngine, retry_after_s: int) -> None:
    """Has the engine refuse everything for its latency targets."""
    engine.status = 429
    engine.answer_headers = {"retry-after": str(retry_after_s), SLO_UNATTAINABLE_HEADER: "true"}
    engine.error_body = {"error": {"code": "slo_unattainable"}}


async def test_an_engine_gets_targets_and_the_time_taken_when_a_client_states_them() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        async with chat(gateway, "hi", TARGETS) as response:
            assert response.status == 200
        sent = engine.headers[-1]
        assert {name: sent[name] for name in TARGETS} == TARGETS
        assert 0 <= int(sent["x-mini-infer-queued-ms"]) < 60_000


async def test_a_client_cannot_say_how_long_its_request_took_when_it_sends_the_gateways_header() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        async with chat(gateway, "hi", {"x-mini-infer-queued-ms": "999999"}) as response:
            assert response.status == 200
        assert int(engine.headers[-1]["x-mini-infer-queued-ms"]) < 60_000


async def test_another_engine_answers_when_one_cannot_meet_the_targets() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        refuse(a, 7)
        async with running_gateway(a.endpoint, b.endpoint) as gateway:
            for number in range(8):
                async with chat(gateway, f"question {number}", TARGETS) as response:
                    assert response.status == 200
            state = gateway.app.fleet.endpoints["a"]
            assert state.phase(gateway.app._clock()) == "ready", "it has room for requests with other targets"
            assert state.breaker.closed
            assert b'reason="slo_unattainable"' in gateway.app.metrics.text() or not a.bodies


async def test_the_refusal_is_relayed_with_its_wait_when_no_engine_meets_the_targets() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        refuse(a, 7)
        refuse(b, 7)
        async with running_gateway(a.endpoint, b.endpoint) as gateway, chat(gateway, "hi", TARGETS) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "7")
            assert SLO_UNATTAINABLE_HEADER not in response.headers
            assert (await response.json())["error"]["code"] == "slo_unattainable"
            assert len(a.bodies) == len(b.bodies) == 1


@pytest.mark.parametrize("stated", ["field", "header"])
async def test_a_request_leaves_the_queue_when_its_first_token_would_be_late(stated: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await engine.report(queued_tokens=BUSY_TOKENS)
        await until(lambda: gateway.app.ledger.load("a").queued_tokens == BUSY_TOKENS)
        fields = {"ttft_ms": 50} if stated == "field" else {}
        headers = {"x-mini-infer-ttft-ms": "50"} if stated == "header" else {}
        async with asyncio.timeout(30), chat(gateway, "hi", headers, **fields) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (429, "slo_unattainable", "ttft_ms")
            assert int(response.headers["retry-after"]) >= 1
        assert not engine.bodies


async def test_a_request_is_refused_at_once_when_the_predicted_wait_is_longer_than_its_target() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await engine.report(queued_tokens=BUSY_TOKENS)
        await until(lambda: gateway.app.ledger.load("a").queued_tokens == BUSY_TOKENS)
        target_ms = 50_000
        async with asyncio.timeout(target_ms / 2000), chat(gateway, "hi", {}, ttft_ms=target_ms) as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) > target_ms / 1000


@pytest.mark.parametrize("value", ["soon", "-5", "nan", "1e999", ""])
async def test_a_ttft_header_is_forwarded_when_it_is_no_number(value: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        async with chat(gateway, "hi", {"x-mini-infer-ttft-ms": value}) as response:
            assert response.status == 200
        assert engine.headers[-1]["x-mini-infer-ttft-ms"] == value
