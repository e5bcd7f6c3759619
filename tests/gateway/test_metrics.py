"""What the figures say when something went wrong: by request, by endpoint, and in the state of each."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until


def value(gateway: RunningGateway, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    families = text_string_to_metric_families(gateway.app.metrics.text().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"mini_infer_gateway_{name}" and labels.items() <= sample.labels.items()
    )


async def broke(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.die_after, engine.chunk_delay_s = 2, 0.02
    async with gateway.chat("hi", stream=True) as response:
        await response.read()


async def in_band_error(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.chunks = [engine.chunks[0], b'data: {"error":{"code":"engine_dead"}}\n\n']
    async with gateway.chat("hi", stream=True) as response:
        await response.read()


async def client_gone(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.chunk_delay_s = 30.0
    async with gateway.chat("hi", stream=True) as response:
        await response.content.readany()


async def server_error(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.status = 503
    async with gateway.chat("hi") as response:
        assert response.status == 503


async def client_error(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.status = 400
    async with gateway.chat("hi") as response:
        assert response.status == 400


async def internal(engine: FakeEngine, gateway: RunningGateway) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake")

    gateway.app.upstream.request = broken  # type: ignore[method-assign]  # the test's fault
    async with gateway.chat("hi") as response:
        assert response.status == 500


async def ok(engine: FakeEngine, gateway: RunningGateway) -> None:
    async with gateway.chat("hi") as response:
        assert response.status == 200


OUTCOMES = [ok, broke, in_band_error, client_gone, server_error, client_error, internal]


@pytest.mark.parametrize("happen", OUTCOMES, ids=lambda happen: happen.__name__)
async def test_outcomes_of_requests_and_attempts_are_counted(happen: Any) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await happen(engine, gateway)
        outcome = happen.__name__
        await until(lambda: value(gateway, "requests_total", model="m", outcome=outcome) == 1)
        await until(lambda: value(gateway, "attempts_total", endpoint="a", outcome=outcome) == 1)
        assert value(gateway, "requests_total") == value(gateway, "attempts_total") == 1
        assert value(gateway, "request_duration_seconds_count", model="m") == (outcome == "ok")
        began = outcome in ("ok", "broke", "in_band_error", "client_gone")
        assert value(gateway, "time_to_first_byte_seconds_count", model="m") == began


async def test_attempts_count_at_both_endpoints_when_a_request_is_retried() -> None:
    async with (
        FakeEngine("bad") as bad,
        FakeEngine("good") as good,
        running_gateway(bad.endpoint, good.endpoint, routing="round-robin") as gateway,
    ):
        bad.status = 500
        await ok(good, gateway)
        assert value(gateway, "attempts_total", endpoint="bad", outcome="retried") == 1
        assert value(gateway, "attempts_total", endpoint="good", outcome="ok") == 1
        assert value(gateway, "requests_total") == 1
        assert value(gateway, "retries_total", reason="status") == 1


async def test_endpoint_metrics_are_dropped_when_an_endpoint_is_gone() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await engine.prefill(list(range(64)))
        await until(lambda: value(gateway, "index_blocks", endpoint="a") == 4)
        assert value(gateway, "event_lag_seconds", endpoint="a") > 0
        engine.status = 503
        for _ in range(3):
            await server_error(engine, gateway)
        assert value(gateway, "circuit_open", endpoint="a", cause="status") == 1
        assert value(gateway, "circuit_open", endpoint="a") == 1
        assert value(gateway, "tokenize_seconds_count") == 3
        gateway.source.publish([])
        assert 'endpoint="a"' not in gateway.app.metrics.text().decode()


async def test_process_metrics_are_exported() -> None:
    async with running_gateway() as gateway:
        text = gateway.app.metrics.text().decode()
        for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "python_info"):
            assert f"\n{name}" in text


async def test_no_partial_event_is_sent_when_an_engine_dies_inside_one() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        whole = engine.chunks[0]
        engine.chunks = [whole, b'data: {"choices":[{"de', b"never sent"]
        engine.die_after, engine.chunk_delay_s = 2, 0.02
        async with gateway.chat("hi", stream=True) as response:
            body = await response.read()
        events = body.split(b"\n\n")
        assert events[0] + b"\n\n" == whole
        assert events[1].startswith(b'data: {"error":')
        assert events[2:] == [b""]
        await asyncio.sleep(0)
