"""What a client sees through the gateway: bytes untouched, retries elsewhere, clear errors, a cancel that arrives."""

import asyncio
import json
import socket

import aiohttp
import pytest

from mini_infer_contract.events import BlockStored
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet import breaker
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway, until


def nobody() -> Endpoint:
    """An endpoint whose port refuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Endpoint(name="nobody", url=f"http://127.0.0.1:{server.getsockname()[1]}", model="m")


async def test_a_stream_is_relayed_chunk_by_chunk() -> None:
    async with FakeEngine("a") as engine:
        engine.chunks = ["data: é{}\n\n".format("x" * n).encode() for n in range(20)] + [b": odd bytes \xff\r\n\r\n"]
        engine.chunk_delay_s = 0.01
        async with running_gateway(engine.endpoint) as gateway, gateway.chat("hi", stream=True) as response:
            chunks = [data async for data, _ in response.content.iter_chunks() if data]
        assert response.content_type == "text/event-stream"
        assert chunks == engine.chunks


async def test_body_and_request_id_are_forwarded_unchanged() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        body = b'{ "messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"}],\n "model" : "m", "seed":1e0 }'
        headers = {"x-request-id": "mine", "authorization": "Bearer k", "content-type": "application/json"}
        async with gateway.client.post(
            gateway.url + "/v1/chat/completions?a=b", data=body, headers=headers
        ) as response:
            assert (await response.json())["served_by"] == "a"
        assert engine.bodies == [body]
        assert engine.headers[0]["x-request-id"] == response.headers["x-request-id"] == "mine"


async def test_only_the_model_field_changes_when_an_alias_is_requested() -> None:
    async with FakeEngine("a") as engine:
        endpoint = Endpoint(name="ns/pod", url=f"http://127.0.0.1:{engine.port}", model="m", service="ns/svc")
        async with running_gateway(endpoint) as gateway:
            body = b'{"messages": [{"role":"user","content":"model"}] ,"model": "ns/svc","x":{"model":"ns/svc"}}'
            async with gateway.client.post(gateway.url + "/v1/chat/completions", data=body) as response:
                assert response.status == 200
        assert engine.bodies == [body.replace(b'"model": "ns/svc"', b'"model": "m"')]


async def test_response_headers_explain_the_routing_decision() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        text = "x" * 100
        async with gateway.chat(text) as response:
            assert response.headers["x-mini-infer-pod"] == "a"
            assert response.headers["x-mini-infer-hit-tokens"] == "0"
            assert response.headers["x-mini-infer-prompt-tokens"] == str(len(f"<user>{text}<assistant>"))
            assert response.headers["x-mini-infer-reason"] == "only"
            assert response.headers["x-mini-infer-index"] == "exact"
            assert len(response.headers["x-request-id"]) == 32
        async with gateway.chat(text) as response:
            assert response.headers["x-mini-infer-hit-tokens"] == "112"
            assert "x-mini-infer-hit-tiers" not in response.headers


async def test_headers_and_metrics_name_the_tiers_when_a_hit_is_not_on_the_device() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        tokens = engine.encoder.encode("<user>" + "x" * 100 + "<assistant>", False)[:112]
        chain = BlockStored([1, 2, 3, 4, 5, 6, 7], None, tokens, 16, medium="DISK")
        gateway.app.index.apply("a", [chain, BlockStored([1, 2], None, tokens[:32], 16, medium="CPU")])
        async with gateway.chat("x" * 100) as response:
            assert response.headers["x-mini-infer-hit-tokens"] == "112"
            assert response.headers["x-mini-infer-hit-tiers"] == "device=0, host=32, disk=80"
        async with gateway.client.get(gateway.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        told = {line.split()[0]: float(line.split()[1]) for line in lines if "hit_t" in line and line[0] != "#"}
        name = "mini_infer_gateway_hit_tier_tokens_total"
        assert told[f'{name}{{model="m",tier="host"}}'] == 32
        assert told[f'{name}{{model="m",tier="disk"}}'] == 80
        assert told['mini_infer_gateway_hit_tokens_total{model="m"}'] == 112


@pytest.mark.parametrize("fault", ["refused", "draining", 429, 500, 502, 503, 504])
async def test_another_endpoint_is_tried_when_the_first_fails_before_its_first_byte(fault: str | int) -> None:
    async with FakeEngine("bad") as bad, FakeEngine("good") as good:
        if fault == "draining":
            bad.draining = True
        elif isinstance(fault, int):
            bad.status = fault
        first = nobody() if fault == "refused" else bad.endpoint
        async with running_gateway(first, good.endpoint, routing="round-robin") as gateway:
            for _ in range(4):
                async with gateway.chat("hi", stream=True) as response:
                    assert response.status == 200
                    assert response.headers["x-mini-infer-pod"] == "good"
                    assert await response.read() == b"".join(good.chunks)


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_an_engines_status_is_forwarded_when_it_is_not_retryable(status: int) -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        a.status = b.status = status
        async with running_gateway(a.endpoint, b.endpoint) as gateway, gateway.chat("hi") as response:
            assert response.status == status
            assert (await response.json())["error"]["message"] == f"status {status}"
        assert len(a.bodies) + len(b.bodies) == (2 if status in (429, 500) else 1)


async def test_a_request_is_retried_only_when_the_endpoint_dies_before_the_first_byte() -> None:
    async with FakeEngine("a") as dying, FakeEngine("b") as good:
        dying.die_after = 0
        async with running_gateway(dying.endpoint, good.endpoint, routing="round-robin") as gateway:
            async with gateway.chat("hi", stream=True) as response:
                assert response.headers["x-mini-infer-pod"] == "b"
            dying.die_after, dying.chunk_delay_s = 2, 0.02
            async with gateway.chat("hi", stream=True) as response:
                text = await response.read()
        assert response.headers["x-mini-infer-pod"] == "a"
        assert text.startswith(b"".join(dying.chunks[:2]))
        last = text.removeprefix(b"".join(dying.chunks[:2])).decode()
        assert last.startswith("data: ")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "endpoint_failed"
        assert len(good.bodies) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_engines_request_is_cancelled_when_the_client_disconnects(stream: bool) -> None:
    async with FakeEngine("a") as engine:
        engine.chunk_delay_s, engine.hang = 30.0, not stream
        async with running_gateway(engine.endpoint) as gateway:

            async def read_all() -> None:
                async with gateway.chat("hi", stream=stream) as response:
                    await response.read()

            reading = asyncio.create_task(read_all())
            await until(lambda: len(engine.bodies) == 1)
            reading.cancel()
            await until(lambda: engine.cancelled == 1)
            await until(lambda: gateway.app.ledger.in_flight("a") == 0)
            assert gateway.app.fleet.endpoints["a"].breaker.closed


async def test_a_request_gets_503_or_404_when_its_model_has_no_endpoint_or_is_unknown() -> None:
    async with running_gateway(nobody()) as gateway:
        async with gateway.chat("hi") as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "1"
            assert (await response.json())["error"]["code"] == "no_endpoint"
        async with gateway.chat("hi", model="other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["param"] == "model"
        gateway.source.publish([])
        async with gateway.chat("hi") as response:
            assert response.status == 503


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"{}", 400, "model"),
        (b'{"model": 3}', 400, "model"),
        (b"\xff", 400, None),
    ],
)
async def test_a_request_gets_a_clear_error_when_its_body_is_invalid(
    body: bytes, status: int, param: str | None
) -> None:
    async with (
        running_gateway(nobody()) as gateway,
        gateway.client.post(gateway.url + "/v1/completions", data=body) as response,
    ):
        assert response.status == status
        error = (await response.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param


async def test_a_request_gets_413_when_its_body_is_over_the_limit() -> None:
    async with running_gateway(nobody(), max_body_bytes=1000) as gateway, gateway.chat("x" * 1000) as response:
        assert response.status == 413


async def test_a_request_gets_504_when_its_endpoint_is_silent() -> None:
    async with FakeEngine("a") as engine:
        engine.hang = True
        async with running_gateway(engine.endpoint, head_timeout_s=0.1) as gateway, gateway.chat("hi") as response:
            assert response.status == 504


async def test_breaker_counts_no_failure_when_an_endpoint_closed_an_idle_connection() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        for _ in range(3):
            async with gateway.chat("hi") as response:
                assert response.status == 200
            for connection in list(engine.connections):
                assert connection.transport is not None
                connection.transport.close()
        assert gateway.app.fleet.endpoints["a"].breaker.closed


async def test_health_metrics_and_debug_pages_are_served() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:

        async def get(path: str) -> tuple[int, str]:
            async with gateway.client.get(gateway.url + path) as response:
                return response.status, await response.text()

        await until(lambda: gateway.app.fleet.is_ready)
        async with gateway.chat("hi") as response:
            assert response.status == 200
        for path in ("/healthz", "/readyz"):
            assert (await get(path))[0] == 200
        assert [model["id"] for model in json.loads((await get("/v1/models"))[1])["data"]] == ["m"]
        assert json.loads((await get("/v1/models/m"))[1])["id"] == "m"
        assert (await get("/v1/models/x"))[0] == 404
        assert (await get("/v1/chat/completions"))[0] == 405
        assert (await get("/nothing"))[0] == 404
        assert json.loads((await get("/debug/endpoints"))[1])["endpoints"][0]["state"] == "ready"
        exported = (await get("/metrics"))[1]
        assert 'mini_infer_gateway_requests_total{model="m",outcome="ok",status="200"} 1.0' in exported
        assert 'mini_infer_gateway_endpoints{model="m",state="ready"} 1.0' in exported
        async with gateway.client.post(gateway.url + "/tokenize", json={"prompt": "ab"}) as response:
            assert len((await response.json())["tokens"]) == 2


async def test_readyz_is_503_until_the_endpoint_source_has_synced() -> None:
    async with running_gateway() as gateway:
        gateway.app.fleet.synced = False
        async with gateway.client.get(gateway.url + "/readyz") as response:
            assert response.status == 503


async def test_a_failing_endpoint_gets_no_requests_until_its_breaker_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", breaker.LONGEST_PAUSE_S)  # however slow the machine is
    async with FakeEngine("bad") as bad, FakeEngine("good") as good:
        bad.status = 503
        async with running_gateway(bad.endpoint, good.endpoint, routing="round-robin") as gateway:
            for _ in range(20):
                async with gateway.chat("hi") as response:
                    assert response.status == 200
            assert len(bad.bodies) == 3
            bad.status = 200
            gateway.app.fleet.endpoints["bad"].breaker.retry_at_s = 0.0
            for _ in range(4):
                async with gateway.chat("hi") as response:
                    assert response.status == 200
            assert len(bad.bodies) > 3
            assert gateway.app.fleet.endpoints["bad"].breaker.closed


async def test_all_streams_complete_when_many_run_at_once() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b, running_gateway(a.endpoint, b.endpoint) as gateway:

        async def one(number: int) -> aiohttp.ClientResponse:
            async with gateway.chat(f"question {number}", stream=True) as response:
                assert await response.read() == b"".join(a.chunks)
            return response

        await asyncio.gather(*map(one, range(100)))
        assert min(len(a.bodies), len(b.bodies)) > 20
        assert gateway.app.ledger.in_flight("a") == gateway.app.ledger.in_flight("b") == 0
