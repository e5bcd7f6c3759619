"""A service that is deleted and made again around its running engines: clients notice nothing."""

from msgspec import structs

from mini_infer_gateway.endpoints.base import Listed, Service
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway

BEFORE, AGAIN = Service("n/m", "2026-01-01T00:00:00Z", "m"), Service("n/m", "2026-02-01T00:00:00Z", "m")


async def status(gateway: RunningGateway) -> int:
    async with gateway.chat("hello") as response:
        await response.read()
        return response.status


async def test_orphaned_engines_keep_their_model_name_until_the_service_is_recreated() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        of_service = Listed(structs.replace(engine.endpoint, service="n/m"))
        seen = []
        for services in ([BEFORE], [], [], [AGAIN], []):
            gateway.source.publish([of_service], services)
            seen.append(await status(gateway))
        assert seen == [200] * 5
        assert gateway.app.fleet.catalog.listed == ("m",)

        other = Service("n/other", "2026-03-01T00:00:00Z", "m")
        gateway.source.publish([of_service], [other])  # it has no engine yet, and the name is its own
        assert await status(gateway) == 503
        assert gateway.app.fleet.catalog.listed == ("n/m",)


async def test_a_pod_gets_no_model_name_when_its_service_never_existed() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        gateway.source.publish([Listed(structs.replace(engine.endpoint, service="n/m", model="x"))], [])
        assert "x" not in gateway.app.fleet.catalog.by_name
