"""The queue in the serving path: requests wait for an engine with room, in order, and leave when they have to."""

import asyncio

import aiohttp
import pytest

from mini_infer_gateway.fleet.load import InFlight
from mini_infer_gateway.pipeline.stages import attempt
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

BUSY_TOKENS = 10_000_000
"""More prompt work than any window: the engine has no room."""


async def busy(gateway: RunningGateway, engine: FakeEngine, queued_tokens: int = BUSY_TOKENS) -> None:
    """Lets the gateway know how much the engine has to do."""
    await engine.report(queued_tokens=queued_tokens)
    await until(lambda: gateway.app.ledger.load(engine.name).queued_tokens == queued_tokens)


async def status_of(gateway: RunningGateway, text: str, **fields: object) -> tuple[int, str | None, str]:
    async with gateway.chat(text, **fields) as response:
        body = await response.json()
        return response.status, response.headers.get("retry-after"), body.get("error", {}).get("code", "")


def sent_order(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets each request's id when it is sent. They arrive in any order: each opens a connection."""
    sent: list[str] = []
    start = gateway.app.ledger.start

    def noted(endpoint: str, request_id: str, uncached_tokens: int) -> InFlight:
        sent.append(request_id)
        return start(endpoint, request_id, uncached_tokens)

    monkeypatch.setattr(gateway.app.ledger, "start", noted)
    return sent


def waiting(gateway: RunningGateway) -> int:
    return gateway.app.backlog.depth("m")


async def status_with_id(gateway: RunningGateway, request_id: str, priority: int) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": request_id}], "priority": priority}
    url, headers = gateway.url + "/v1/chat/completions", {"x-request-id": request_id}
    async with gateway.client.post(url, json=body, headers=headers) as response:
        await response.read()
        return response.status


async def metric(gateway: RunningGateway, name: str) -> float:
    lines = gateway.app.metrics.text().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def test_waiting_requests_are_sent_by_priority_when_the_engine_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_priority=-3) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        requested, sent = [], sent_order(gateway, monkeypatch)
        for number, priority in enumerate([0, 3, -3]):
            requested.append(asyncio.ensure_future(status_with_id(gateway, f"number-{number}", priority)))
            await until(lambda number=number: waiting(gateway) == number + 1)
        assert engine.bodies == []
        assert await metric(gateway, 'mini_infer_gateway_queue_depth{model="m"}') == 3
        await busy(gateway, engine, 0)
        assert await asyncio.gather(*requested) == [200] * 3
        assert sent[0] == "number-2"
        assert waiting(gateway) == 0
        assert await metric(gateway, 'mini_infer_gateway_queue_wait_error_seconds_count{model="m"}') == 3


async def test_waiting_requests_are_ordered_by_their_queue_timeout() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_priority=-3) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        requested = []
        for number, timeout_s in enumerate(["50", "no number", "20"]):
            headers = {"x-mini-infer-queue-timeout": timeout_s}
            body = {"model": "m", "messages": [{"role": "user", "content": f"number {number}"}]}
            url = gateway.url + "/v1/chat/completions"
            requested.append(asyncio.ensure_future(gateway.client.post(url, json=body, headers=headers)))
            await until(lambda number=number: waiting(gateway) == number + 1)
        order = [entry.order[1] for entry in gateway.app.backlog.waiting("a")]
        assert [round(order[1] - order[0]), round(order[2] - order[0])] == [30, 40]
        await busy(gateway, engine, 0)
        for response in await asyncio.gather(*requested):
            assert response.status == 200
            response.release()


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_queue=1) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        first = asyncio.ensure_future(status_of(gateway, "first"))
        await until(lambda: waiting(gateway) == 1)
        status, retry_after, code = await status_of(gateway, "one too many")
        assert (status, code) == (429, "queue_full")
        assert int(retry_after or 0) >= 1
        await busy(gateway, engine, 0)
        assert (await first)[0] == 200


async def test_the_last_waiting_request_is_refused_when_a_higher_priority_arrives() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_priority=-3, max_queue=1) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        first = asyncio.ensure_future(status_of(gateway, "first"))
        await until(lambda: waiting(gateway) == 1)
        urgent = asyncio.ensure_future(status_of(gateway, "urgent", priority=-1))
        assert (await first)[0] == 429
        await busy(gateway, engine, 0)
        assert (await urgent)[0] == 200


async def test_a_request_is_answered_with_an_error_when_it_waits_too_long() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, queue_timeout_s=0.2) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        status, retry_after, code = await status_of(gateway, "late")
        assert (status, code) == (503, "queue_timeout")
        assert retry_after
        assert waiting(gateway) == 0
        assert engine.bodies == []


async def test_a_waiting_request_is_dropped_when_its_client_disconnects() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        async with aiohttp.ClientSession() as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            requested = asyncio.ensure_future(client.post(gateway.url + "/v1/chat/completions", json=body))
            await until(lambda: waiting(gateway) == 1)
            requested.cancel()
        await until(lambda: waiting(gateway) == 0)
        await busy(gateway, engine, 0)
        assert engine.bodies == []
        assert gateway.app.ledger.in_flight("a") == 0


async def test_waiting_requests_are_rerouted_when_another_engine_appears() -> None:
    async with FakeEngine("a") as first, FakeEngine("b") as second, running_gateway(first.endpoint) as gateway:
        await gateway.settled()
        await busy(gateway, first)
        requested = [asyncio.ensure_future(status_of(gateway, f"number {number}")) for number in range(3)]
        await until(lambda: waiting(gateway) == 3)
        gateway.source.publish_endpoints(first.endpoint, second.endpoint)
        assert [status for status, _, _ in await asyncio.gather(*requested)] == [200] * 3
        assert len(second.bodies) == 3


async def test_an_engine_gets_all_requests_when_it_sends_no_load_reports() -> None:
    async with FakeEngine("a", events=False) as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled("approximate")
        engine.chunk_delay_s = 0.05
        text = "x" * 20_000
        answers = await asyncio.gather(*(status_of(gateway, f"{number} {text}") for number in range(8)))
        assert [status for status, _, _ in answers] == [200] * 8
        assert await metric(gateway, "mini_infer_gateway_queue_wait_error_seconds_count") == 0


async def test_tokenize_requests_never_wait() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        async with gateway.client.post(gateway.url + "/tokenize", json={"model": "m", "prompt": "x"}) as response:
            assert response.status == 200


async def test_a_request_stays_counted_nowhere_when_an_error_of_ours_ends_it_after_its_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()

        def broken(*_: object) -> None:
            raise RuntimeError("an error of the gateway's own")

        monkeypatch.setattr(attempt, "write_request", broken)
        for _ in range(3):
            async with gateway.chat("hi") as response:
                assert response.status == 500
        assert gateway.app.ledger.in_flight("a") == 0
