"""One bad pod beside a good one: what clients see, what the bad one still gets, and when it is used again."""

import asyncio
import contextlib
from contextlib import AsyncExitStack

import openai
import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet import breaker, liveness, watchdog
from mini_infer_gateway.http.upstream import Upstream
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's times, a fifth as long."""
    for module, names in {
        liveness: ("SILENT_S", "SUSPECT_S", "STUCK_S", "CONFIRMED_S"),
        watchdog: ("TICK_S", "LATE_S", "PROBE_TIMEOUT_S"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name) / 5)


async def statuses(gateway: RunningGateway, count: int) -> list[int]:
    found = []
    for number in range(count):
        async with gateway.chat(f"question {number}") as response:
            await response.read()
            found.append(response.status)
    return found


async def kill(engine: FakeEngine) -> None:
    """Ends it as SIGKILL does: every connection breaks at once, nothing listens."""
    for connection in list(engine.connections):
        if connection.transport is not None:
            connection.transport.abort()
    await engine.stop()


async def test_requests_go_to_another_pod_when_one_answers_429() -> None:
    async with FakeEngine("full") as full, FakeEngine("idle") as idle:
        full.status = 429
        async with running_gateway(full.endpoint, idle.endpoint, routing="load") as gateway:
            assert set(await statuses(gateway, 200)) == {200}
            assert len(full.bodies) < 10
            assert gateway.app.fleet.endpoints["full"].breaker.closed, "busy is not broken"


async def test_429_is_forwarded_and_its_retry_after_obeyed_when_no_pod_has_room() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        a.status = b.status = 429
        a.answer_headers = b.answer_headers = {"retry-after": "7"}
        async with running_gateway(a.endpoint, b.endpoint) as gateway:
            async with gateway.chat("hi") as response:
                assert response.status == 429
                assert response.headers["retry-after"] == "7"
            for state in gateway.app.fleet.endpoints.values():
                assert state.phase(gateway.app._clock() + 6.0) == "overloaded"
                assert state.phase(gateway.app._clock() + 8.0) == "ready"


@pytest.mark.parametrize("fault", ["broke", "engine_dead"])
async def test_a_request_is_refused_when_it_has_ended_two_engines(fault: str) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(name)) for name in "abcd"]
        for engine in engines:
            engine.die_after = 0
            if fault == "engine_dead":
                engine.status, engine.error_body = 503, {"error": {"code": "engine_dead"}}
        endpoints = [engine.endpoint for engine in engines]
        gateway = await stack.enter_async_context(running_gateway(*endpoints, max_attempts=4))
        async with gateway.chat("poison", stream=True) as response:
            assert response.status == 502
            assert response.headers["x-should-retry"] == "false"
            assert (await response.json())["error"]["code"] == "endpoints_ended"
        assert sum(len(engine.bodies) for engine in engines) == 2


async def dies_at(poison: bytes, works_s: float) -> tuple[Endpoint, list[bytes], asyncio.Server]:
    """An engine that answers, keeps connections, and ends for good of a body with `poison`; its bodies."""
    bodies: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if head.startswith(b"POST"):
                bodies.append(body)
            if poison in body:
                await asyncio.sleep(works_s)
                server.close()
                break
            status = b"200 OK" if head.startswith((b"POST", b"GET /readyz")) else b"404 Not Found"
            writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")
        writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return Endpoint(name=url, url=url, model="m"), bodies, server


@pytest.mark.parametrize("works_s", [0.0, 0.2], ids=["at_once", "after_work"])
async def test_two_engines_end_and_no_third_when_a_poison_request_comes_over_kept_connections(works_s: float) -> None:
    engines = [await dies_at(b"poison", works_s) for _ in range(6)]
    endpoints = [endpoint for endpoint, _, _ in engines]
    async with running_gateway(*endpoints, max_attempts=6, routing="round-robin") as gateway:
        assert set(await statuses(gateway, 12)) == {200}
        assert all(bodies for _, bodies, _ in engines), "there is a kept connection to each"
        base_url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="one", max_retries=2) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "poison"}])
        assert (caught.value.status_code, caught.value.code) == (502, "endpoints_ended")
        for _ in range(3):
            async with gateway.chat("poison", extra=None) as response:
                first = await response.json()
            async with gateway.chat("poison", extra=None) as response:
                assert first["error"]["code"] == (await response.json())["error"]["code"] == "endpoints_ended"
    assert sum(b"poison" in body for _, bodies, _ in engines for body in bodies) == 4, "two for each of two bodies"


async def test_a_kept_connection_is_replaced_when_its_endpoint_closed_it_while_idle() -> None:
    accepted = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await reader.readuntil(b"\r\n\r\n")
        accepted += 1
        writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    upstream = Upstream(1.0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(4):
        assert await upstream.fetch(url, "/", 1.0) == (200, b"ok")
    assert accepted >= 1
    upstream.close()
    server.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 777 Odd\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
        b"220 smtp ready\r\n",
    ],
    ids=["101", "204", "777", "two", "endless", "smtp"],
)
async def test_a_request_is_retried_or_gets_502_when_an_answer_is_malformed(answer: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer if head.startswith(b"POST") else b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    odd = Endpoint(name="odd", url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")
    async with running_gateway(odd) as gateway:
        async with gateway.chat("hi") as response:
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "endpoint_malformed"
        async with FakeEngine("good") as good:
            gateway.source.publish_endpoints(odd, good.endpoint)
            assert await statuses(gateway, 4) == [200] * 4
    server.close()


async def test_a_request_gets_504_when_its_deadline_passes_over_all_attempts() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        a.hang = b.hang = True
        async with running_gateway(a.endpoint, b.endpoint, request_deadline_s=0.3) as gateway:
            async with asyncio.timeout(60.0), gateway.chat("hi") as response:
                assert response.status == 504
            assert len(a.bodies) + len(b.bodies) == 1


async def test_requests_get_503_and_never_500_when_a_breaker_opened_thousands_of_times() -> None:
    async with FakeEngine("a") as engine:
        engine.status = 503
        async with running_gateway(engine.endpoint) as gateway:
            state = gateway.app.fleet.endpoints["a"]
            state.breaker.openings = 5_000
            assert set(await statuses(gateway, 20)) == {503}


async def test_a_hung_pod_without_reports_is_ejected_when_its_clients_give_up_early(quick: None) -> None:
    """Each client waits a tenth of what the verdict takes."""
    async with (
        FakeEngine("hung", events=False) as hung,
        FakeEngine("good", events=False) as good,
        running_gateway(hung.endpoint, good.endpoint, routing="round-robin") as gateway,
    ):
        assert set(await statuses(gateway, 20)) == {200}
        hung.hang = True
        state = gateway.app.fleet.endpoints["hung"]

        async def impatient() -> None:
            while state.breaker.closed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(liveness.STUCK_S / 10), gateway.chat("hi") as response:
                        await response.read()

        async with asyncio.timeout(120.0):
            await asyncio.gather(*(impatient() for _ in range(4)))
        assert state.breaker.cause is breaker.Cause.SLOW
        sent = len(hung.bodies)
        assert set(await statuses(gateway, 20)) == {200}
        assert len(hung.bodies) == sent


@pytest.mark.parametrize("events", [True, False])
async def test_a_pod_that_died_with_requests_in_flight_is_used_again_when_it_is_ready(events: bool) -> None:
    async with (
        FakeEngine("dying", events=events) as dying,
        FakeEngine("good") as good,
        running_gateway(dying.endpoint, good.endpoint, routing="round-robin") as gateway,
    ):
        dying.hang = True
        hanging = asyncio.gather(*(statuses(gateway, 1) for _ in range(24)))
        await until(lambda: len(dying.bodies) >= 12)
        port, events_port = dying.port, dying.events_port
        await kill(dying)
        assert {status for found in await hanging for status in found} == {200}
        await statuses(gateway, 6)
        state = gateway.app.fleet.endpoints["dying"]
        assert not state.breaker.closed
        dying.hang, probes = False, dying.probes
        await dying.start(port, events_port)
        await until(lambda: state.breaker.closed)  # nobody sends anything meanwhile
        assert dying.probes <= probes + 3, "half a second from one to the next: two seconds at most"
        before = len(dying.bodies)
        await statuses(gateway, 2)
        assert len(dying.bodies) == before + 1


async def test_a_breaker_stays_open_when_a_pod_is_ready_and_answers_500(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", breaker.LONGEST_PAUSE_S)  # however slow the machine is
    async with FakeEngine("bad") as bad, FakeEngine("good") as good:
        bad.status = 500
        async with running_gateway(bad.endpoint, good.endpoint, routing="round-robin") as gateway:
            assert set(await statuses(gateway, 20)) == {200}
            before = bad.probes
            await until(lambda: bad.probes >= before + 3)
            assert not gateway.app.fleet.endpoints["bad"].breaker.closed
            assert len(bad.bodies) == 3


async def test_pending_requests_are_retried_elsewhere_when_a_pod_hangs(quick: None) -> None:
    async with (
        FakeEngine("hung") as hung,
        FakeEngine("good") as good,
        running_gateway(hung.endpoint, good.endpoint, routing="round-robin") as gateway,
    ):
        await gateway.settled()
        await hung.report()
        await until(lambda: gateway.app.fleet.endpoints["hung"].subscriber.report_s is not None)
        hung.hang = True
        async with asyncio.timeout(60.0):
            found = await asyncio.gather(*(statuses(gateway, 1) for _ in range(10)))
        assert {status for one in found for status in one} == {200}
        state = gateway.app.fleet.endpoints["hung"]
        assert not state.breaker.closed
        assert hung.cancelled == 5, "the hung pod is told that nobody waits any more"
        assert set(await statuses(gateway, 4)) == {200}
        assert len(hung.bodies) == 5
        hung.hang = False
        await hung.report()
        await until(lambda: state.breaker.closed)


async def test_a_hung_pod_is_detected_by_comparison_with_its_peers_when_it_sends_no_events(quick: None) -> None:
    async with FakeEngine("hung", events=False) as hung, FakeEngine("good", events=False) as good:
        hung.is_ready = None
        async with running_gateway(hung.endpoint, good.endpoint, routing="round-robin") as gateway:
            await statuses(gateway, 4)
            hung.hang = True
            async with asyncio.timeout(60.0):
                assert set(await statuses(gateway, 4)) == {200}
            assert not gateway.app.fleet.endpoints["hung"].breaker.closed


async def test_a_silent_pod_keeps_its_requests_when_there_is_no_other(quick: None) -> None:
    async with FakeEngine("only") as only, running_gateway(only.endpoint) as gateway:
        await gateway.settled()
        await only.report()
        await until(lambda: gateway.app.fleet.endpoints["only"].subscriber.report_s is not None)
        only.hang = True
        pending = asyncio.create_task(statuses(gateway, 1))
        await until(lambda: not gateway.app.fleet.endpoints["only"].breaker.closed)
        before = only.probes
        await until(lambda: only.probes >= before + 3)
        assert not pending.done()
        assert only.cancelled == 0
        pending.cancel()


@pytest.mark.parametrize("draining", [False, True])
async def test_pending_requests_are_retried_elsewhere_when_their_pod_is_removed(draining: bool) -> None:
    async with (
        FakeEngine("lost") as lost,
        FakeEngine("good") as good,
        running_gateway(lost.endpoint, good.endpoint, routing="round-robin") as gateway,
    ):
        good.hang = lost.hang = True
        pending = asyncio.gather(*(statuses(gateway, 1) for _ in range(2)))
        await until(lambda: len(lost.bodies) == len(good.bodies) == 1)
        good.hang = False
        gateway.source.publish_endpoints(lost.endpoint, good.endpoint, draining={"lost"} if draining else set())
        gateway.source.publish_endpoints(good.endpoint)
        if draining:
            await asyncio.sleep(0.1)
            assert len(good.bodies) == 1, "a pod that drains finishes what it has"
        else:
            await until(lambda: len(good.bodies) == 2)
            await until(lambda: lost.cancelled == 1)
        pending.cancel()
