"""Pairs on the wire: what engines are told of each other, what clients cannot say, prefill engines that go wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mini_infer_contract.launch import FETCH_FROM_HEADER, KV_FALLBACK_HEADER, PREFILL_FROM_HEADER
from mini_infer_gateway.fleet.breaker import Cause
from tests.gateway.test_metrics import value
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

LONG = "a long prompt " * 300


def engine(name: str, role: str, revision: str = "1") -> FakeEngine:
    made = FakeEngine(name)
    made.role, made.transfer, made.revision = role, f"tcp://10.0.0.1:{5559 + ord(name[-1])}", revision
    return made


@asynccontextmanager
async def fleet(*engines: FakeEngine, **settings: Any) -> AsyncIterator[RunningGateway]:
    """Started, and each known by a load report."""
    for one in engines:
        await one.start()
    try:
        async with running_gateway(*(one.endpoint for one in engines), **settings) as gateway:
            await gateway.settled()
            for one in engines:
                await reported(gateway, one)
            yield gateway
    finally:
        for one in engines:
            await one.stop()


async def reported(gateway: RunningGateway, one: FakeEngine, **load: Any) -> None:
    state = gateway.app.fleet.endpoints[one.name]
    before = state.subscriber.report_s
    await one.report(**load)
    await until(lambda: state.subscriber.report_s != before)


async def send_request(gateway: RunningGateway, text: str, **fields: Any) -> str:
    async with gateway.chat(text, **fields) as response:
        assert response.status == 200
        await response.read()
        return response.headers.get("x-mini-infer-prefill-pod", "")


def sources_of(one: FakeEngine) -> list[tuple[str | None, str | None]]:
    """(prefill from, fetch from) of each request."""
    return [(headers.get(PREFILL_FROM_HEADER), headers.get(FETCH_FROM_HEADER)) for headers in one.headers]


async def test_the_decode_engine_gets_the_prefill_engines_address_when_a_prompt_is_computed_apart() -> None:
    prefill, decode = engine("p1", "prefill"), engine("d1", "decode")
    async with fleet(prefill, decode) as gateway:
        assert await send_request(gateway, LONG, stream=True) == "p1"
        assert await send_request(gateway, "short") == ""
        assert sources_of(decode) == [(prefill.transfer, None), (None, None)]
        assert prefill.bodies == []
        assert value(gateway, "prefill_placements_total", placement="apart", reason="cheaper") == 1
        assert value(gateway, "prefill_placements_total", placement="local", reason="short") == 1
        assert value(gateway, "first_token_apart_seconds_count", kind="expected") == 1
        assert value(gateway, "first_token_apart_seconds_sum", kind="actual") > 0
        assert value(gateway, "prefill_break_even_tokens", model="m") > 0


@pytest.mark.parametrize("name", [PREFILL_FROM_HEADER, FETCH_FROM_HEADER])
async def test_transfer_headers_are_stripped_when_a_client_sends_them(name: str) -> None:
    decode = engine("d1", "decode")
    async with fleet(decode) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
        headers = {name: "tcp://10.9.9.9:1"}
        async with gateway.client.post(gateway.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
        assert sources_of(decode) == [(None, None)]


async def test_only_requests_with_one_decoded_prompt_are_disaggregated() -> None:
    prefill, decode = engine("p1", "prefill"), engine("d1", "decode")
    async with fleet(prefill, decode, max_local_prefill_tokens=0) as gateway:
        for path, fields in {
            "/v1/completions": {"prompt": [LONG, LONG]},
            "/tokenize": {"prompt": LONG},
            "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
        }.items():
            async with gateway.client.post(gateway.url + path, json={"model": "m", **fields}) as response:
                assert response.status == 200
        async with gateway.client.post(
            gateway.url + "/v1/completions", json={"model": "m", "prompt": LONG}
        ) as response:
            assert response.status == 200
        assert [prefill_from for prefill_from, _ in sources_of(decode)] == [None, None, prefill.transfer]


async def test_a_prompt_counts_as_prefill_load_until_the_answer_begins() -> None:
    prefill, decode = engine("p1", "prefill"), engine("d1", "decode")
    async with fleet(prefill, decode) as gateway:
        load = gateway.app.ledger.load
        decode.answer_delay_s = 0.3
        pending = asyncio.create_task(send_request(gateway, LONG, stream=True))
        await until(lambda: bool(decode.bodies))
        assert load("p1").queued_tokens > 4000
        assert load("d1").queued_tokens == 0  # it computes nothing
        assert load("d1").running == 1
        await pending
        assert load("p1").queued_tokens == load("p1").running == load("d1").running == 0
        assert gateway.app.index.cached_blocks("p1") > 200, "what it has computed it holds"


@pytest.mark.parametrize(
    ("stream", "reason"), [(False, "late"), (True, "late"), (True, "mismatch"), (True, "distrusted")]
)
async def test_a_prefill_engines_breaker_opens_when_its_kv_does_not_arrive(stream: bool, reason: str) -> None:
    prefill, decode = engine("p1", "prefill"), engine("d1", "decode")
    async with fleet(prefill, decode) as gateway:
        breaker = gateway.app.fleet.endpoints["p1"].breaker
        decode.answer_headers = {KV_FALLBACK_HEADER: reason}
        async with gateway.chat(f"0 {LONG}", stream=stream) as response:
            assert KV_FALLBACK_HEADER not in response.headers, "a word between engine and gateway"
            await response.read()
        for number in (1, 2):
            assert await send_request(gateway, f"{number} {LONG}", stream=stream) == "p1"
        assert breaker.cause is Cause.TRANSFER
        assert await send_request(gateway, f"3 {LONG}", stream=stream) == ""
        assert value(gateway, "first_token_apart_seconds_count", kind="actual") == 0, "none of them came apart"
        breaker.retry_at_s = 0.0
        assert await send_request(gateway, f"4 {LONG}", stream=stream) == "p1"
        assert not breaker.closed, "and again nothing came"
        breaker.retry_at_s, decode.answer_headers = 0.0, {}
        assert await send_request(gateway, f"5 {LONG}", stream=stream) == "p1"
        assert breaker.closed


async def test_a_prefill_engines_breaker_stays_closed_when_computing_was_cheaper_than_the_transfer() -> None:
    prefill, decode = engine("p1", "prefill"), engine("d1", "decode")
    async with fleet(prefill, decode) as gateway:
        decode.answer_headers = {KV_FALLBACK_HEADER: "computing_is_cheaper"}
        for number in range(4):
            assert await send_request(gateway, f"{number} {LONG}", stream=True) == "p1"
        assert gateway.app.fleet.endpoints["p1"].breaker.closed


@pytest.mark.parametrize("fault", ["killed", "silent", "source"])
async def test_a_prefill_engine_is_not_chosen_when_it_is_gone(fault: str) -> None:
    prefill, decode = engine("p1", "prefill"), engine("d1", "decode")
    async with fleet(prefill, decode) as gateway:
        state = gateway.app.fleet.endpoints["p1"]
        if fault == "source":
            gateway.source.publish_endpoints(prefill.endpoint, decode.endpoint, draining=("p1",))
        elif fault == "killed":
            prefill.silence()
            await until(lambda: state.subscriber.report_s is None)
            assert state.phase(gateway.app._clock()) == "silent"
        else:
            assert state.subscriber.report_s is not None
            state.subscriber.report_s -= 10.0  # its reports stopped ten seconds ago
        assert await send_request(gateway, LONG) == ""
        assert sources_of(decode) == [(None, None)]
        assert value(gateway, "prefill_placements_total", reason="no_prefill_endpoint") == 1
        if fault == "killed":
            prefill.speak(prefill.events_port)
            await until(lambda: state.subscriber.live)
            await reported(gateway, prefill)
            assert await send_request(gateway, "another " + LONG) == "p1"


async def test_a_retry_excludes_both_engines_when_a_pair_failed() -> None:
    prefill, broken, well = engine("p1", "prefill"), engine("d1", "decode"), engine("d2", "decode")
    broken.status = 503
    async with fleet(prefill, broken, well) as gateway:
        await reported(gateway, well, running=20)
        assert await send_request(gateway, LONG) == ""
        assert sources_of(broken) == [(prefill.transfer, None)]
        assert sources_of(well) == [(None, None)]


async def test_roles_follow_load_reports_when_engines_switch() -> None:
    one, two = engine("e1", "unified"), engine("e2", "unified")
    async with fleet(one, two) as gateway:
        await reported(gateway, one, role="prefill")
        await reported(gateway, two, role="decode")
        assert await send_request(gateway, LONG) == "e1"
        await reported(gateway, one, role="decode")
        await reported(gateway, two, role="prefill")
        assert await send_request(gateway, "another " + LONG) == "e2"
        assert (len(one.bodies), len(two.bodies)) == (1, 1)


async def test_a_request_gets_503_with_retry_after_when_only_prefill_engines_exist() -> None:
    async with fleet(engine("p1", "prefill")) as gateway, gateway.chat(LONG) as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "no_endpoint"
        assert "retry-after" in response.headers


async def test_a_request_waits_at_the_gateway_when_its_prefill_engine_is_full() -> None:
    prefill, decode = engine("p1", "prefill"), engine("d1", "decode")
    async with fleet(prefill, decode, max_local_prefill_tokens=0) as gateway:
        await reported(gateway, prefill, queued_tokens=1_000_000)
        pending = asyncio.create_task(send_request(gateway, LONG))
        await until(lambda: gateway.app.backlog.depth("m") == 1)
        assert gateway.app.backlog.waiting("p1")
        assert not decode.bodies
        await reported(gateway, prefill)
        assert await pending == "p1"


async def test_the_engine_gets_a_peers_address_when_the_peer_has_the_prompt_cached() -> None:
    busy, idle = engine("u1", "unified"), engine("u2", "unified")
    async with fleet(busy, idle) as gateway:
        await reported(gateway, idle, running=200)
        await send_request(gateway, LONG)
        assert len(busy.bodies) == 1
        await reported(gateway, idle)
        await reported(gateway, busy, running=200)
        await send_request(gateway, LONG)
        assert sources_of(idle) == [(None, busy.transfer)]
        assert value(gateway, "prefill_placements_total", placement="fetched") == 1
