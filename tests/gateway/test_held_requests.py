"""Requests of a service without engines wait until one is ready: none is lost, and their number is bounded."""

import asyncio

import msgspec
import pytest

from mini_infer_contract.scaling import SCALING_PATH, GatewayLoads
from mini_infer_gateway.endpoints.base import Listed, Service
from mini_infer_gateway.endpoints.services import service_of
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

NAME = "default/demo"
SLEEPER = Service(NAME, "2026-01-01T00:00:00Z", "m", starts_on_demand=True)
AWAKE = Service(NAME, "2026-01-01T00:00:00Z", "m")


def publish(gateway: RunningGateway, *engines: FakeEngine, service: Service = SLEEPER, ready: bool = True) -> None:
    endpoints = [msgspec.structs.replace(engine.endpoint, service=NAME) for engine in engines]
    gateway.source.publish([Listed(endpoint, ready) for endpoint in endpoints], [service])


async def chat(gateway: RunningGateway, **fields: object) -> tuple[int, str | None, str, str]:
    async with gateway.chat("hello", **fields) as response:
        text = await response.text()
        code = "" if fields.get("stream") or response.status == 200 else msgspec.json.decode(text)["error"]["code"]
        return response.status, response.headers.get("retry-after"), code, text


def held(gateway: RunningGateway) -> int:
    return gateway.app.held.counts().get("m", 0)


async def test_requests_are_held_and_answered_when_the_first_engine_is_ready() -> None:
    async with FakeEngine("a") as engine, running_gateway(sse_keepalive_s=0.05) as gateway:
        publish(gateway)
        asked = [asyncio.ensure_future(chat(gateway, stream=number % 2 == 0)) for number in range(20)]
        await until(lambda: held(gateway) == 20)
        async with gateway.client.get(gateway.url + SCALING_PATH) as response:
            report = msgspec.json.decode(await response.read(), type=GatewayLoads)
        assert report.services[NAME].queued_requests == 20
        async with gateway.client.get(gateway.url + "/v1/models") as response:
            assert [one["id"] for one in (await response.json())["data"]] == ["m"]
        await asyncio.sleep(0.12)  # a stream that waits gets comments
        publish(gateway, engine, ready=False)
        await asyncio.sleep(0.12)
        assert held(gateway) == 20  # an engine that is not ready releases nobody
        publish(gateway, engine)
        answers = await asyncio.gather(*asked)
    assert [status for status, *_ in answers] == [200] * 20
    streams = [text for _, _, _, text in answers[::2]]
    assert all(text.startswith(":") and "data: [DONE]" in text for text in streams)
    assert held(gateway) == 0


async def test_request_gets_429_with_the_expected_wait_when_too_many_are_held_or_it_waited_too_long() -> None:
    async with running_gateway(max_queue=2, start_timeout_s=0.3) as gateway:
        publish(gateway)
        first = [asyncio.ensure_future(chat(gateway)) for _ in range(2)]
        await until(lambda: held(gateway) == 2)
        status, retry_after, code, _ = await chat(gateway)
        assert (status, code) == (429, "engine_starting")
        assert 1 <= int(retry_after or 0) <= 31
        assert [(status, code) for status, _, code, _ in await asyncio.gather(*first)] == [(429, "engine_starting")] * 2
        assert held(gateway) == 0


async def test_expected_wait_is_that_of_the_last_start() -> None:
    loop = asyncio.get_running_loop()
    async with FakeEngine("a") as engine, running_gateway(max_queue=1) as gateway:
        began_s = loop.time()
        publish(gateway)
        asked = asyncio.ensure_future(chat(gateway))
        await until(lambda: held(gateway) == 1)
        publish(gateway, engine)
        assert (await asked)[0] == 200
        publish(gateway)
        asked = asyncio.ensure_future(chat(gateway))
        await until(lambda: held(gateway) == 1)
        status, retry_after, code, _ = await chat(gateway)
        assert (status, code) == (429, "engine_starting")
        assert 1 <= int(retry_after or 0) <= 1 + loop.time() - began_s
        publish(gateway, engine)
        assert (await asked)[0] == 200


async def test_client_that_leaves_is_held_no_more() -> None:
    async with running_gateway() as gateway:
        publish(gateway)
        asked = asyncio.ensure_future(chat(gateway))
        await until(lambda: held(gateway) == 1)
        asked.cancel()
        await until(lambda: held(gateway) == 0)


@pytest.mark.parametrize("service", [AWAKE, Service(NAME, "2026-01-01T00:00:00Z", "other", starts_on_demand=True)])
async def test_request_is_refused_at_once_when_its_model_does_not_start_on_demand(service: Service) -> None:
    async with running_gateway() as gateway:
        publish(gateway, service=service)
        assert (await chat(gateway))[0] in {404, 503}


async def test_held_requests_are_refused_when_their_service_is_deleted() -> None:
    async with running_gateway() as gateway:
        publish(gateway)
        asked = asyncio.ensure_future(chat(gateway))
        await until(lambda: held(gateway) == 1)
        gateway.source.publish([], [])
        assert (await asked)[0] == 503


async def test_ten_cycles_of_zero_lose_no_request() -> None:
    """Held and running requests as the only engine comes and goes: what is cut starts again on the next one."""
    async with FakeEngine("a") as engine, running_gateway() as gateway:
        statuses: list[int] = []
        for _ in range(10):
            publish(gateway)
            await until(lambda: not gateway.app.fleet.endpoints)
            asked = [asyncio.ensure_future(chat(gateway)) for _ in range(20)]
            await until(lambda: held(gateway) == 20)
            publish(gateway, engine)
            statuses += [status for status, *_ in await asyncio.gather(*asked)]
    assert statuses == [200] * 200


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"unified": {"scaling": {"minReplicas": 0, "maxReplicas": 2}}}, True),
        ({"decode": {"scaling": {"minReplicas": 0, "maxReplicas": 2}}, "prefill": {"replicas": 1}}, True),
        ({"unified": {"scaling": {"minReplicas": 1, "maxReplicas": 2}}}, False),
        ({"unified": {"scaling": {"minReplicas": 0, "maxReplicas": 2, "owner": "Autoscaler"}}}, False),
        ({"unified": {"replicas": 0}}, False),
        ({"unified": {"scaling": None}}, False),
    ],
)
def test_service_starts_on_demand_when_the_planner_may_stop_its_last_engine(
    spec: dict[str, object], expected: bool
) -> None:
    manifest = {"metadata": {"name": "demo", "namespace": "default"}, "spec": {"model": {}, **spec}}
    assert service_of(manifest).starts_on_demand is expected
