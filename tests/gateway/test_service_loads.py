"""`GET /scaling`: what a gateway counts of each service."""

import asyncio

import msgspec

from mini_infer_contract.launch import Endpoint
from mini_infer_contract.scaling import SCALING_PATH, GatewayLoads, ServiceLoad
from tests.gateway.test_waiting_here import busy
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

SERVICE = "default/demo"


def of_service(engine: FakeEngine) -> Endpoint:
    return msgspec.structs.replace(engine.endpoint, service=SERVICE)


async def report(gateway: RunningGateway) -> GatewayLoads:
    async with gateway.client.get(gateway.url + SCALING_PATH) as response:
        assert response.status == 200
        return msgspec.json.decode(await response.read(), type=GatewayLoads)


async def load(gateway: RunningGateway) -> ServiceLoad:
    return (await report(gateway)).services[SERVICE]


async def test_requests_answers_and_latencies_are_counted_for_the_service_of_their_model() -> None:
    async with (
        FakeEngine("a") as engine,
        running_gateway(of_service(engine)) as gateway,
    ):
        await gateway.settled()
        for stream in (True, True, False):
            async with gateway.chat("some words", stream=stream) as response:
                await response.read()
        async with gateway.chat("some words", model="unknown") as response:
            assert response.status == 404
        found = await load(gateway)
    assert (found.requests, found.running_requests, found.queued_requests) == (3, 0, 0)
    assert found.prompt_tokens > 0
    assert sum(found.ttft_counts) == 2
    assert found.answers <= 3
    assert list(found.engines) == ["a"]


async def test_waiting_requests_are_counted_with_their_tokens() -> None:
    async with (
        FakeEngine("a") as engine,
        running_gateway(of_service(engine)) as gateway,
    ):
        await gateway.settled()
        await busy(gateway, engine)

        async def chat() -> int:
            async with gateway.chat("a prompt that waits") as response:
                return response.status

        asked = [asyncio.ensure_future(chat()) for _ in range(3)]
        await until(lambda: gateway.app.backlog.depth("m") == 3)
        found = await load(gateway)
        assert (found.queued_requests, found.requests) == (3, 3)
        assert found.queued_tokens > 0
        assert found.engines["a"].queued_tokens > 0
        await busy(gateway, engine, 0)
        assert await asyncio.gather(*asked) == [200] * 3
        assert (await load(gateway)).queued_tokens == 0


async def test_counters_begin_with_the_gateway() -> None:
    async with FakeEngine("a") as engine:
        starts = []
        for _ in range(2):
            async with running_gateway(of_service(engine)) as gateway:
                await gateway.settled()
                starts.append((await report(gateway)).started_s)
    assert starts[0] != starts[1]
